//! `HookedBase`: the native half of a `HookedModule`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrohook_core::{Phase, Placement};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFunction, PyString, PyTuple};

use crate::call;
use crate::error::hook_error;
use crate::hooks::options::OnError;
use crate::registry::{Audience, Registry};
use crate::torch::cache::{CallCache, InstanceCache};
use crate::torch::target::Target;

/// Native half of a `HookedModule`: its call, its registry and the module inside.
///
/// A class `(HookedBase, nn.Module)` inherits the call as its `tp_call`: no Python frame stands
/// between `hooked(x)` and the first hook.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct HookedBase {
    inner: OnceLock<Py<PyAny>>,
    class_cache: CallCache,
    cache: InstanceCache,
    released: AtomicBool,
    registry: OnceLock<Py<Registry>>,
    /// True if the wrapper is a shallow copy: it shares the hooks of the original.
    shares_hooks: AtomicBool,
}

impl HookedBase {
    fn inner<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        if self.released.load(Ordering::Acquire) {
            return Err(hook_error(
                py,
                "this HookedModule no longer has a module, since into_inner() returned it: wrap \
                 the module again",
            ));
        }
        self.inner
            .get()
            .map(|inner| inner.bind(py))
            .ok_or_else(|| not_initialised(py))
    }

    pub fn registry<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, Registry>> {
        self.registry
            .get()
            .map(|registry| registry.bind(py))
            .ok_or_else(|| not_initialised(py))
    }

    /// Registers a hook by `Registry.register`, which refuses options that the phase has not; with the
    /// module itself if torch looks for the hook there.
    fn register<'py>(
        &self,
        phase: Phase,
        hook: &Bound<'py, PyAny>,
        prepend: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = hook.py();
        // Refused after into_inner: the hook could never fire.
        let (inner, registry) = (self.inner(py)?, self.registry(py)?);
        let forward = matches!(phase, Phase::ForwardPre | Phase::Forward);
        if forward && keeps_state_in_torch_hooks(hook)? {
            return inner.call_method(format!("register_{phase}_hook"), (hook,), options);
        }
        // Most hooks: without a call by Python, which takes as long as the registering.
        if options.is_none() && prepend.is_empty() {
            let (placement, options) = (Placement::default(), OnError::Raise.into());
            let audience = Audience::of_caller(py, None)?;
            let registry = registry.get();
            let handle = registry.register(phase, hook, placement, options, audience, None)?;
            return Ok(Bound::new(py, handle)?.into_any());
        }
        let first = (phase.name(), hook).into_pyobject(py)?;
        let arguments = first.as_sequence().concat(prepend.as_sequence())?;
        let register = registry.getattr(intern!(py, "register"))?;
        register.call(arguments.to_tuple()?, options)
    }
}

/// True for a hook that torch looks up in its own dicts: hooks of prune (of users' subclasses too),
/// `weight_norm` and `spectral_norm`, and the observers of quantisation, which are functions.
#[pyfunction]
pub fn keeps_state_in_torch_hooks(hook: &Bound<'_, PyAny>) -> PyResult<bool> {
    let name = intern!(hook.py(), "__module__");
    let of_torch = |module: Bound<'_, PyAny>| -> PyResult<bool> {
        let Ok(module) = module.cast::<PyString>() else {
            return Ok(false); // a property of the class, say
        };
        let module = module.to_cow()?;
        Ok(module.starts_with("torch.nn.utils.") || module.starts_with("torch.ao.quantization."))
    };
    match hook.getattr_opt(name)? {
        Some(module) if module.is_truthy()? && of_torch(module.clone())? => return Ok(true),
        Some(_) if hook.is_instance_of::<PyFunction>() => return Ok(false), // most hooks
        _ => {}
    }
    for class in hook.get_type().mro() {
        if of_torch(class.getattr(name)?)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn not_initialised(py: Python<'_>) -> PyErr {
    hook_error(
        py,
        "this HookedModule wraps no module: HookedModule.__init__ was not called",
    )
}

#[pymethods]
impl HookedBase {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self {
            inner: OnceLock::new(),
            class_cache: CallCache::default(),
            cache: InstanceCache::default(),
            released: AtomicBool::new(false),
            registry: OnceLock::new(),
            shares_hooks: AtomicBool::new(false),
        }
    }

    /// Sets the wrapped module, once.
    fn _wrap(
        slf: &Bound<'_, Self>,
        inner: &Bound<'_, PyAny>,
        registry: &Bound<'_, Registry>,
        shares_hooks: bool,
    ) -> PyResult<()> {
        let this = slf.get();
        this.shares_hooks.store(shares_hooks, Ordering::Relaxed);
        let first = this.inner.set(inner.clone().unbind()).is_ok();
        let first = this.registry.set(registry.clone().unbind()).is_ok() && first;
        if first {
            return Ok(());
        }
        Err(hook_error(
            inner.py(),
            "this HookedModule already wraps a module",
        ))
    }

    /// Marks the module as released by `into_inner`, and removes the hooks. A shallow copy leaves the
    /// hooks, which it shares.
    fn _release(&self, py: Python<'_>) -> PyResult<()> {
        self.released.store(true, Ordering::Release);
        if !self.shares_hooks.load(Ordering::Relaxed) {
            self.registry(py)?.get().clear(None);
        }
        Ok(())
    }

    /// The wrapped module.
    #[getter]
    fn _inner<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        self.inner(py)
    }

    /// The registry.
    #[getter]
    fn _registry<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, Registry>> {
        self.registry(py)
    }

    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        #[cfg(all(Py_3_12, not(Py_3_14)))]
        let _depth = crate::cpython::depth::Depth::enter(slf.py())?;
        let this = slf.get();
        let inner = this.inner(slf.py())?;
        let registry = this.registry(slf.py())?;
        let target = Target::Module(inner, &this.class_cache, &this.cache);
        call::call(slf.as_any(), &target, registry, args, kwargs)
    }

    /// Registers a hook that runs before the module and may replace its input.
    ///
    /// Args:
    ///     hook: a plain callable with PyTorch's contract, `hook(module, args)` or, with
    ///         `with_kwargs`, `hook(module, args, kwargs)`; or a `ForwardPreHook`.
    ///     prepend: ahead of all others of its priority, instead of after them.
    ///     with_kwargs: pass the keyword arguments too, and expect `(args, kwargs)` back.
    ///     priority: higher fires first.
    ///     on_error: how a call handles the hook's exception: `raise` it, `disable` the hook
    ///         (logged once) and go on, or `ignore` it.
    ///     scope: the hook fires only in the contexts that entered this scope, until it is left.
    ///
    /// Returns:
    ///     The handle that removes the hook.
    ///
    /// Raises:
    ///     HookTypeError: not a callable, a typed hook of another phase, or an option of the wrong
    ///         type.
    ///     ValueError: an unknown `on_error`.
    #[pyo3(signature = (hook, **options), text_signature = "($self, hook, *, prepend=False, with_kwargs=False, priority=0, on_error='raise', scope=None)")]
    fn register_forward_pre_hook<'py>(
        &self,
        hook: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.register(Phase::ForwardPre, hook, &PyTuple::empty(hook.py()), options)
    }

    /// Registers a hook that runs after the module and may replace its output.
    ///
    /// Args:
    ///     hook: a plain callable with PyTorch's contract, `hook(module, args, output)` or, with
    ///         `with_kwargs`, `hook(module, args, kwargs, output)`; or a `ForwardHook`.
    ///     prepend: ahead of all others of its priority, instead of after them.
    ///     with_kwargs: pass the keyword arguments too.
    ///     always_call: run the hook also when the call fails, for every exception; its output is
    ///         None where the module did not return.
    ///     priority: higher fires first.
    ///     on_error: how a call handles the hook's exception: `raise` it, `disable` the hook
    ///         (logged once) and go on, or `ignore` it.
    ///     scope: the hook fires only in the contexts that entered this scope, until it is left.
    ///
    /// Returns:
    ///     The handle that removes the hook.
    ///
    /// Raises:
    ///     HookTypeError: not a callable, a typed hook of another phase, or an option of the wrong
    ///         type.
    ///     ValueError: an unknown `on_error`.
    #[pyo3(signature = (hook, **options), text_signature = "($self, hook, *, prepend=False, with_kwargs=False, always_call=False, priority=0, on_error='raise', scope=None)")]
    fn register_forward_hook<'py>(
        &self,
        hook: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.register(Phase::Forward, hook, &PyTuple::empty(hook.py()), options)
    }

    /// Registers a hook that runs before gradients flow into the module and may replace the
    /// gradient of its output.
    ///
    /// Args:
    ///     hook: a plain callable with PyTorch's contract, `hook(module, grad_output)`, where
    ///         `grad_output` is a tuple with an entry for each output, None for non-tensors.
    ///     prepend: ahead of all others of its priority, instead of after them.
    ///     priority: higher fires first.
    ///     on_error: how a call handles the hook's exception: `raise` it, `disable` the hook
    ///         (logged once) and go on, or `ignore` it.
    ///     scope: the hook fires only in the contexts that entered this scope, until it is left.
    ///
    /// Returns:
    ///     The handle that removes the hook.
    ///
    /// Raises:
    ///     HookTypeError: not a callable, a typed hook, or an option of the wrong type.
    ///     ValueError: an unknown `on_error`.
    #[pyo3(signature = (hook, *prepend, **options), text_signature = "($self, hook, prepend=False, *, priority=0, on_error='raise', scope=None)")]
    fn register_full_backward_pre_hook<'py>(
        &self,
        hook: &Bound<'py, PyAny>,
        prepend: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.register(Phase::BackwardPre, hook, prepend, options)
    }

    /// Registers a hook that runs after gradients flowed through the module and may replace the
    /// gradient of its input.
    ///
    /// Args:
    ///     hook: a plain callable with PyTorch's contract, `hook(module, grad_input,
    ///         grad_output)`, both tuples with an entry for each positional input and each output,
    ///         None for non-tensors; or a `BackwardHook`. In a call with keyword arguments alone
    ///         `grad_input` has an entry for each of those (PyTorch: an empty tuple).
    ///     prepend: ahead of all others of its priority, instead of after them.
    ///     priority: higher fires first.
    ///     on_error: how a call handles the hook's exception: `raise` it, `disable` the hook
    ///         (logged once) and go on, or `ignore` it.
    ///     scope: the hook fires only in the contexts that entered this scope, until it is left.
    ///
    /// Returns:
    ///     The handle that removes the hook.
    ///
    /// Raises:
    ///     HookTypeError: not a callable, a typed hook of another phase, or an option of the wrong
    ///         type.
    ///     ValueError: an unknown `on_error`.
    #[pyo3(signature = (hook, *prepend, **options), text_signature = "($self, hook, prepend=False, *, priority=0, on_error='raise', scope=None)")]
    fn register_full_backward_hook<'py>(
        &self,
        hook: &Bound<'py, PyAny>,
        prepend: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.register(Phase::Backward, hook, prepend, options)
    }

    /// `register_full_backward_hook` under ferrotorch's name. PyTorch's method of this name
    /// registers a deprecated kind of hook that misses gradients; that kind is not offered.
    #[pyo3(signature = (hook, *prepend, **options), text_signature = "($self, hook, prepend=False, *, priority=0, on_error='raise', scope=None)")]
    fn register_backward_hook<'py>(
        &self,
        hook: &Bound<'py, PyAny>,
        prepend: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.register(Phase::Backward, hook, prepend, options)
    }

    // No `__clear__`: a cycle through the module or the registry can be cut there.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self.inner.get())?;
        self.class_cache.traverse(&visit)?;
        visit.call(self.registry.get())
    }
}
