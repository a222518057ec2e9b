//! Access to torch, imported at first use: the extension itself does not link torch.
//!
//! Nothing mutable is cached without a guard. A change by another library takes effect at the next
//! call: to the module's hook dicts, to torch's global ones or their names, to `forward` on the
//! instance or the class, to `nn.Module.__call__`.

pub mod cache;
pub mod copies;
pub mod facts;
pub mod hooks;
pub mod made;
pub mod nested;
pub mod saved;
pub mod target;
pub mod tensors;
pub mod transforms;
pub mod tree;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFunction, PyString, PyType};

use crate::cpython::dict::{Variable, instance_dict};
use crate::cpython::empty_cache::EmptyCache;
use crate::cpython::once::Once;

pub struct Torch {
    /// `object.__getattribute__`.
    plain_getattribute: Py<PyAny>,
    /// Globals of `torch.nn.modules.module`, and the hook dicts for all modules among them.
    globals: Py<PyDict>,
    global_hooks: [Variable; 4],
    no_global_hooks: EmptyCache<4>,
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
    trace_map: [Variable; 1],
    not_traced: EmptyCache<1>,
    tensor: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TORCH: Once<Torch> = Once::new();
        TORCH.get_or_try_init(py, || {
            let module = py.import("torch.nn.modules.module")?;
            let torch = py.import("torch")?;
            let globals = module.dict();
            let example = instance_dict(&module.getattr("Module")?.call0()?)?;
            let trace_globals = py.import("torch.jit._trace")?.dict();
            let hooks = [
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
                "_backward_pre_hooks",
            ];
            Ok(Self {
                plain_getattribute: py.get_type::<PyAny>().getattr("__getattribute__")?.unbind(),
                global_hooks: hooks
                    .map(|name| Variable::like_in(&globals, &format!("_global{name}"))),
                no_global_hooks: EmptyCache::default(),
                globals: globals.unbind(),
                module_hooks: hooks.map(|name| Variable::like_in(&example, name)),
                compiled_call: Variable::like_in(&example, "_compiled_call_impl"),
                instance_call_impl: Variable::like_in(&example, "_call_impl"),
                instance_forward: Variable::like_in(&example, "forward"),
                children: Variable::like_in(&example, "_modules"),
                trace_map: [Variable::like_in(&trace_globals, "_trace_module_map")],
                not_traced: EmptyCache::default(),
                trace_globals: trace_globals.unbind(),
                tensor: torch.getattr("Tensor")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            })
        })
    }

    /// True if torch has no hooks for all modules and traces nothing.
    fn idle(&self, py: Python<'_>) -> PyResult<bool> {
        let hooks = self.globals.bind(py);
        Ok(self.no_global_hooks.empty(hooks, &self.global_hooks)? && !self.traces(py)?)
    }

    /// True while torch.jit traces a module.
    fn traces(&self, py: Python<'_>) -> PyResult<bool> {
        let globals = self.trace_globals.bind(py);
        Ok(!self.not_traced.empty(globals, &self.trace_map)?)
    }

    /// True if `method` is torch's own definition of a method of `nn.Module`, and no replacement by
    /// another library.
    fn defines(&self, method: &Bound<'_, PyAny>, name: &Bound<'_, PyString>) -> PyResult<bool> {
        let py = method.py();
        if !method.is_exact_instance_of::<PyFunction>() {
            return Ok(false);
        }
        let globals = method.getattr(intern!(py, "__globals__"))?;
        let code = method.getattr(intern!(py, "__code__"))?;
        Ok(globals.is(&self.globals) && code.getattr(intern!(py, "co_name"))?.eq(name)?)
    }

    fn defines_call(&self, method: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.defines(method, intern!(method.py(), "_wrapped_call_impl"))
    }

    fn defines_call_impl(&self, method: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.defines(method, intern!(method.py(), "_call_impl"))
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

/// True if Dynamo traces backward passes, with backward hooks in them.
pub fn compiles_backward(py: Python<'_>) -> PyResult<bool> {
    let compiled_autograd = py.import("torch._dynamo.compiled_autograd")?;
    compiled_autograd
        .getattr("compiled_autograd_enabled")?
        .is_truthy()
}

/// Makes a tensor of an int, which no mode of the current context (a trace's, say) sees.
pub fn plain_int_tensor(py: Python<'_>, value: u64) -> PyResult<Bound<'_, PyAny>> {
    let modes = py.import("torch.utils._python_dispatch")?;
    let disabled = modes.getattr("_disable_current_modes")?.call0()?;
    disabled.call_method0("__enter__")?;
    let tensor = tensors::host_tensor(py, value, "int64");
    disabled.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
    tensor
}

/// Returns the value of a call that a capture has ended.
pub fn stopped(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("ferrohook.captures.capture")?.getattr("STOPPED")
}

/// True if an exception ends a recomputation of `torch.utils.checkpoint`, once all that backward
/// needs is there. It is raised by operators, those in hooks included.
pub fn ends_recomputation(error: &PyErr, py: Python<'_>) -> bool {
    static CLASS: Once<Py<PyType>> = Once::new();
    // A torch without that class ends none early.
    CLASS
        .import(py, "torch.utils.checkpoint", "_StopRecomputationError")
        .is_ok_and(|class| error.is_instance(py, class))
}
