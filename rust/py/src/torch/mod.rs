//! Access to torch, imported at first use: the extension itself does not link torch.
//!
//! Nothing mutable is cached without a guard. A change by another library to the module's hook
//! dicts, to torch's global ones, to `forward` on the instance or the class, or to
//! `nn.Module.__call__` takes effect at the next call.

pub mod cache;
pub mod hooks;
pub mod target;
pub mod tensors;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule, PyType};

use crate::cpython::dict::{Variable, instance_dict};

pub struct Torch {
    /// `torch.nn.modules.module`.
    module: Py<PyModule>,
    /// `nn.Module.__call__` as torch defines it, and the `_call_impl` that it calls.
    module_call: Py<PyAny>,
    module_call_impl: Py<PyAny>,
    /// `object.__getattribute__`.
    plain_getattribute: Py<PyAny>,
    /// Global hook dicts, which torch changes in place.
    global_hooks: [Py<PyDict>; 4],
    /// Hook dicts of one module, in its instance dict.
    module_hooks: [Variable; 4],
    /// Attribute that `nn.Module.compile` sets in the instance dict.
    compiled_call: Variable,
    /// `_call_impl` in the instance dict, overriding the class's.
    instance_call_impl: Variable,
    /// `forward` in the instance dict, overriding the class's.
    instance_forward: Variable,
    /// Children of a module.
    children: Variable,
    /// Globals of `torch.jit._trace`, and the one that is set while it traces.
    trace_globals: Py<PyDict>,
    trace_map: Variable,
    tensor: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let module = py.import("torch.nn.modules.module")?;
            let torch = py.import("torch")?;
            let global = |name| -> PyResult<_> { Ok(module.getattr(name)?.cast_into()?.unbind()) };
            let example = instance_dict(&module.getattr("Module")?.call0()?)?;
            let trace_globals = py.import("torch.jit._trace")?.dict();
            Ok(Self {
                module: module.clone().unbind(),
                module_call: module.getattr("Module")?.getattr("__call__")?.unbind(),
                module_call_impl: module.getattr("Module")?.getattr("_call_impl")?.unbind(),
                plain_getattribute: py.get_type::<PyAny>().getattr("__getattribute__")?.unbind(),
                global_hooks: [
                    global("_global_forward_hooks")?,
                    global("_global_forward_pre_hooks")?,
                    global("_global_backward_hooks")?,
                    global("_global_backward_pre_hooks")?,
                ],
                module_hooks: [
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                    "_backward_pre_hooks",
                ]
                .map(|name| Variable::like_in(&example, name)),
                compiled_call: Variable::like_in(&example, "_compiled_call_impl"),
                instance_call_impl: Variable::like_in(&example, "_call_impl"),
                instance_forward: Variable::like_in(&example, "forward"),
                children: Variable::like_in(&example, "_modules"),
                trace_map: Variable::like_in(&trace_globals, "_trace_module_map"),
                trace_globals: trace_globals.unbind(),
                tensor: torch.getattr("Tensor")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            })
        })
    }
}

/// Returns the original class of an instrumented class; any other class itself.
pub fn plain_class<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyType>> {
    match class.getattr_opt(intern!(class.py(), "_made_from"))? {
        Some(bases) => Ok(bases.get_item(1)?.cast_into()?),
        None => Ok(class.clone()),
    }
}

/// Returns the children of the module with this instance dict; None if it stores them elsewhere.
pub fn children<'py>(state: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let children = Torch::get(state.py())?.children.get(state)?;
    Ok(children.and_then(|children| children.cast_into().ok()))
}

/// True if `value` is a `torch.Tensor`.
pub fn is_tensor(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.is_instance(Torch::get(value.py())?.tensor.bind(value.py()))
}

/// True if this thread records gradients.
pub fn is_grad_enabled(py: Python<'_>) -> PyResult<bool> {
    Torch::get(py)?
        .is_grad_enabled
        .bind(py)
        .call0()?
        .is_truthy()
}

/// Makes a tensor of zeros of the same shape, dtype and device.
pub fn zeros_like<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let torch = tensor.py().import(intern!(tensor.py(), "torch"))?;
    torch.call_method1(intern!(tensor.py(), "zeros_like"), (tensor,))
}

/// Returns the value of a call that a capture has ended.
pub fn stopped(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("ferrohook.activations")?.getattr("STOPPED")
}
