//! `Target`: the code that a call runs between its pre-hooks and its forward hooks.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::cpython::dict::instance_dict;
use crate::cpython::invoke;
use crate::torch::cache::{CachedClass, CallCache, CallPath, InstanceCache, calls_forward};
use crate::torch::hooks::{TorchHook, TorchHooks};
use crate::torch::{Torch, plain_class};

/// Code that a call runs between its pre-hooks and its forward hooks.
pub enum Target<'a, 'py> {
    /// The module inside a wrapper, called as a whole, its own torch hooks included.
    Module(&'a Bound<'py, PyAny>, &'a CallCache, &'a InstanceCache),
    /// The `forward` of the module's class; torch has no hooks as the call begins.
    Forward(&'a CachedClass, &'a InstanceCache),
    /// The `forward` of the module; torch has no hooks as the call begins.
    OwnForward(Bound<'py, PyAny>, &'a InstanceCache),
    /// A callable in place of `forward`, or `forward` with torch's hooks; None: the callable runs
    /// these itself. As in torch it is looked up before the hooks run.
    Special(Bound<'py, PyAny>, Option<TorchHooks<'py>>),
    /// A replacement of `nn.Module.__call__`. It calls `_call_impl`, which runs the hooks; none
    /// runs around it.
    Outer(Bound<'py, PyAny>),
}

impl<'a, 'py> Target<'a, 'py> {
    /// Finds the target of an instrumented module's call; `state` is its instance dict.
    pub fn of(
        module: &Bound<'py, PyAny>,
        state: Bound<'py, PyDict>,
        class_cache: &'a CallCache,
        cache: &'a InstanceCache,
        through_call: bool,
    ) -> PyResult<Self> {
        let py = module.py();
        let torch = Torch::get(py)?;
        let class = module.get_type();
        let cached = class_cache.get(torch, &class)?;
        if !cached.is_some_and(|cached| cached.by_torch(through_call)) {
            let plain = plain_class(&class)?;
            let call = plain.getattr(intern!(py, "__call__"))?;
            if through_call && !torch.defines_call(&call)? {
                return Ok(Self::Outer(bind(&call, module)?));
            }
            let call_impl = plain.getattr(intern!(py, "_call_impl"))?;
            if !torch.defines_call_impl(&call_impl)? {
                return Ok(Self::Special(bind(&call_impl, module)?, None));
            }
        }
        if let Some(forward) = Self::forward(torch, module, cached, cache, &state)? {
            return Ok(forward);
        }
        // Replacements of `_call_impl`, by `nn.Module.compile` or another library.
        for variable in [&torch.compiled_call, &torch.instance_call_impl] {
            if through_call
                && !variable.missing_or_empty(&state)?
                && let Some(call_impl) = state.get_item(&variable.name)?
            {
                return Ok(Self::Special(call_impl, None));
            }
        }
        // Records the module's name while torch.jit traces.
        let forward = module.getattr(if torch.traces(py)? {
            intern!(py, "_slow_forward")
        } else {
            intern!(py, "forward")
        })?;
        Ok(Self::Special(forward, Some(TorchHooks(state))))
    }

    /// Returns `module.forward` as the target, if a call would only run that; `state` is its instance
    /// dict.
    fn forward(
        torch: &Torch,
        module: &Bound<'py, PyAny>,
        cached: Option<&'a CachedClass>,
        cache: &'a InstanceCache,
        state: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Self>> {
        Ok(match (cache.path(torch, state)?, cached) {
            (CallPath::Slow, _) => None,
            (CallPath::Direct, Some(cached)) => Some(Self::Forward(cached, cache)),
            _ => {
                let forward = module.getattr(intern!(module.py(), "forward"))?;
                Some(Self::OwnForward(forward, cache))
            }
        })
    }

    pub fn call(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Module(inner, class_cache, cache) => {
                call_inner(inner, class_cache, cache, args, kwargs)
            }
            Self::Forward(cached, _) => {
                invoke::call_with_first(cached.forward.bind(module.py()), module, args, kwargs)
            }
            Self::OwnForward(callable, _) | Self::Special(callable, _) | Self::Outer(callable) => {
                invoke::call_with(callable, args, kwargs)
            }
        }
    }

    /// Torch's hooks that the call has to run.
    pub fn torch_hooks(&self) -> Option<&TorchHooks<'py>> {
        match self {
            Self::Special(_, hooks) => hooks.as_ref(),
            _ => None,
        }
    }

    /// Torch's hooks to run after the module that pre-hooks have added.
    pub fn added_hooks(&self, module: &Bound<'py, PyAny>) -> PyResult<Vec<TorchHook<'py>>> {
        match self {
            Self::Forward(_, cache) | Self::OwnForward(_, cache) => {
                let state = instance_dict(module)?;
                match cache.path(Torch::get(module.py())?, &state)? {
                    CallPath::Slow => TorchHooks(state).forward(),
                    CallPath::Direct | CallPath::InstanceForward => Ok(Vec::new()),
                }
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The module whose `forward` a call of `called` runs in the end.
    pub fn module<'b>(&'b self, called: &'b Bound<'py, PyAny>) -> &'b Bound<'py, PyAny> {
        match self {
            Self::Module(inner, ..) => inner,
            _ => called,
        }
    }
}

/// Calls `module(*args, **kwargs)`.
///
/// Calls `module.forward` directly if that is equivalent: nothing overrides `__call__`, torch has
/// no hooks on the module or globally, the module is not compiled in place and nothing is traced.
fn call_inner<'py>(
    module: &Bound<'py, PyAny>,
    class_cache: &CallCache,
    cache: &InstanceCache,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let torch = Torch::get(module.py())?;
    let class = module.get_type();
    let cached = class_cache.get(torch, &class)?;
    let calls_forward = match cached {
        Some(cached) => cached.calls_forward,
        None => calls_forward(torch, &class)?,
    };
    if calls_forward {
        // As in `Target::forward`, without a target: a tenth of the call.
        match (cache.path(torch, &instance_dict(module)?)?, cached) {
            (CallPath::Slow, _) => {}
            (CallPath::Direct, Some(cached)) => {
                let forward = cached.forward.bind(module.py());
                return invoke::call_with_first(forward, module, args, kwargs);
            }
            _ => {
                let forward = module.getattr(intern!(module.py(), "forward"))?;
                return invoke::call_with(&forward, args, kwargs);
            }
        }
    }
    invoke::call_with(module, args, kwargs)
}

/// Calls a module of an instrumented class by the `__call__` of its original class, or by the
/// `_call_impl`.
pub fn call_plain<'py>(
    module: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
    through_call: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let class = module.getattr(intern!(py, "__class__"))?;
    let call = class.getattr(if through_call {
        intern!(py, "__call__")
    } else {
        intern!(py, "_call_impl")
    })?;
    invoke::call_with_first(&call, module, args, kwargs)
}

/// Binds a method of a class to an instance.
fn bind<'py>(
    method: &Bound<'py, PyAny>,
    module: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    match method.getattr_opt(intern!(module.py(), "__get__"))? {
        Some(get) => get.call1((module,)),
        None => Ok(method.clone()),
    }
}
