//! What this crate knows of torch. Imported at first use: the extension itself needs no torch.
//!
//! Nothing that can change is remembered between calls. What another library did to the module's
//! hook dicts, to torch's global ones, to `forward` on the instance or to `nn.Module.__call__`
//! is seen by the next call.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};
use pyo3::{ffi, types::PyModule};

struct Torch {
    /// `nn.Module.__call__` as torch defines it.
    module_call: Py<PyAny>,
    /// The variables of `torch.nn.modules.module`, where the global hooks are.
    module_globals: Py<PyDict>,
    /// The variables of `torch.jit._trace`.
    trace_globals: Py<PyDict>,
    tensor: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    backward_pass: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let module = py.import("torch.nn.modules.module")?;
            let torch = py.import("torch")?;
            Ok(Self {
                module_call: module.getattr("Module")?.getattr("__call__")?.unbind(),
                module_globals: module.dict().unbind(),
                trace_globals: py.import("torch.jit._trace")?.dict().unbind(),
                tensor: torch.getattr("Tensor")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                backward_pass: PyModule::import(py, "ferrohook.backward")?
                    .getattr("BackwardPass")?
                    .unbind(),
            })
        })
    }
}

/// Calls `module` as `module(*args, **kwargs)` does.
///
/// Where that would come down to `module.forward`, goes there without the detour: nothing
/// overrides `__call__`, no hook of torch's is registered on the module or globally, the module is
/// not compiled in place and nothing is being traced.
pub fn call_module<'py>(
    module: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    if comes_down_to_forward(Torch::get(py)?, module)? {
        module.getattr(intern!(py, "forward"))?.call(args, kwargs)
    } else {
        module.call(args, kwargs)
    }
}

fn comes_down_to_forward(torch: &Torch, module: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = module.py();
    if !module
        .get_type()
        .getattr(intern!(py, "__call__"))?
        .is(&torch.module_call)
    {
        return Ok(false);
    }
    let state = instance_dict(module)?;
    let globals = torch.module_globals.bind(py);
    Ok(lacks(&state, intern!(py, "_forward_hooks"))?
        && lacks(&state, intern!(py, "_forward_pre_hooks"))?
        && lacks(&state, intern!(py, "_backward_hooks"))?
        && lacks(&state, intern!(py, "_backward_pre_hooks"))?
        && lacks(globals, intern!(py, "_global_forward_hooks"))?
        && lacks(globals, intern!(py, "_global_forward_pre_hooks"))?
        && lacks(globals, intern!(py, "_global_backward_hooks"))?
        && lacks(globals, intern!(py, "_global_backward_pre_hooks"))?
        && lacks(&state, intern!(py, "_compiled_call_impl"))?
        && lacks(
            torch.trace_globals.bind(py),
            intern!(py, "_trace_module_map"),
        )?)
}

/// Whether `name` is missing from `dict`, or None, or an empty dict.
fn lacks(dict: &Bound<'_, PyDict>, name: &Bound<'_, PyString>) -> PyResult<bool> {
    Ok(match dict.get_item(name)? {
        None => true,
        Some(value) => match value.cast::<PyDict>() {
            Ok(hooks) => hooks.is_empty(),
            Err(_) => value.is_none(),
        },
    })
}

/// `object.__dict__`, past any `__getattribute__`.
fn instance_dict<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: `object` is a live object and the null context is what the function takes from C; it
    // returns a new reference, or null with an exception set.
    let dict = unsafe {
        Bound::from_owned_ptr_or_err(
            object.py(),
            ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut()),
        )
    }?;
    Ok(dict.cast_into()?)
}

/// Whether `value` is a `torch.Tensor`.
pub fn is_tensor(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.is_instance(Torch::get(value.py())?.tensor.bind(value.py()))
}

/// Whether this thread records gradients.
pub fn is_grad_enabled(py: Python<'_>) -> PyResult<bool> {
    Torch::get(py)?
        .is_grad_enabled
        .bind(py)
        .call0()?
        .is_truthy()
}

/// One call's `ferrohook.backward.BackwardPass`.
pub fn backward_pass<'py>(
    module: &Bound<'py, PyAny>,
    registry: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    Torch::get(py)?
        .backward_pass
        .bind(py)
        .call1((module, registry))
}
