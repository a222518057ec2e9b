//! The target of a call: the code between the hooks before the module and those after.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::cpython::dict::instance_dict;
use crate::cpython::invoke;
use crate::torch::cache::{CachedClass, CallCache, CallPath, InstanceCache, calls_forward};
use crate::torch::hooks::TorchHooks;
use crate::torch::{Torch, plain_class};

/// The code between the hooks before the module and the hooks after it.
pub enum Target<'a, 'py> {
    /// The module inside a wrapper, called as a whole: with its own torch hooks and whatever else.
    Module(&'a Bound<'py, PyAny>, &'a CallCache, &'a InstanceCache),
    /// The module's own `forward`, which is that of its class.
    Forward(&'a CachedClass),
    /// The same, where torch's hooks have to run too or something stands in for `forward`: as
    /// torch does, what is there before the hooks run.
    Special(Bound<'py, PyAny>, TorchHooks<'py>),
    /// A replacement of `nn.Module.__call__`: it comes back by `_call_impl`, and no
    /// hook runs around it.
    Outer(Bound<'py, PyAny>),
}

impl<'a, 'py> Target<'a, 'py> {
    /// The target of an instrumented module's call; `state` is its instance dict.
    pub fn of(
        module: &Bound<'py, PyAny>,
        state: Bound<'py, PyDict>,
        class_cache: &'a CallCache,
        cache: &InstanceCache,
        through_call: bool,
    ) -> PyResult<Self> {
        let py = module.py();
        let torch = Torch::get(py)?;
        let class = module.get_type();
        let cached = class_cache.get(torch, &class)?;
        if !cached.is_some_and(|cached| cached.by_torch(through_call)) {
            let plain = plain_class(&class)?;
            let call = plain.getattr(intern!(py, "__call__"))?;
            if through_call && !call.is(&torch.module_call) {
                return Ok(Self::Outer(bind(&call, module)?));
            }
            let call_impl = plain.getattr(intern!(py, "_call_impl"))?;
            if !call_impl.is(&torch.module_call_impl) {
                return Ok(Self::Special(bind(&call_impl, module)?, TorchHooks::none()));
            }
        }
        if let Some(forward) = Self::forward(module, cached, cache.path(torch, &state)?)? {
            return Ok(forward);
        }
        // Replacements of torch's own call, by `nn.Module.compile` or somebody else.
        for variable in [&torch.compiled_call, &torch.instance_call_impl] {
            if through_call
                && !variable.missing_or_empty(&state)?
                && let Some(call_impl) = state.get_item(&variable.name)?
            {
                return Ok(Self::Special(call_impl, TorchHooks::none()));
            }
        }
        // Notes the name of the module while torch.jit traces, and else just calls forward.
        let forward = module.getattr(intern!(py, "_slow_forward"))?;
        Ok(Self::Special(forward, TorchHooks::of(state)))
    }

    /// `module.forward`, where calling the module comes down to that.
    fn forward(
        module: &Bound<'py, PyAny>,
        cached: Option<&'a CachedClass>,
        path: CallPath,
    ) -> PyResult<Option<Self>> {
        Ok(match (path, cached) {
            (CallPath::Slow, _) => None,
            (CallPath::Direct, Some(cached)) => Some(Self::Forward(cached)),
            _ => {
                let forward = module.getattr(intern!(module.py(), "forward"))?;
                Some(Self::Special(forward, TorchHooks::none()))
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
            Self::Forward(cached) => {
                invoke::call_with_first(cached.forward.bind(module.py()), module, args, kwargs)
            }
            Self::Special(callable, _) | Self::Outer(callable) => {
                invoke::call_with(callable, args, kwargs)
            }
        }
    }

    /// Torch's hooks that run beside the module's own, if any do.
    pub fn torch_hooks(&self) -> Option<&TorchHooks<'py>> {
        match self {
            Self::Special(_, hooks) => hooks.any().then_some(hooks),
            Self::Module(..) | Self::Forward(..) | Self::Outer(_) => None,
        }
    }

    /// The module whose `forward` is called in the end, when `called` is called.
    pub fn module<'b>(&'b self, called: &'b Bound<'py, PyAny>) -> &'b Bound<'py, PyAny> {
        match self {
            Self::Module(inner, ..) => inner,
            _ => called,
        }
    }
}

/// Calls `module` as `module(*args, **kwargs)` does.
///
/// Where that would come down to `module.forward`, goes there without the detour: nothing
/// overrides `__call__`, no hook of torch's is registered on the module or globally, the
/// module is not compiled in place and nothing is being traced.
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
        let path = cache.path(torch, &instance_dict(module)?)?;
        if let Some(forward) = Target::forward(module, cached, path)? {
            return forward.call(module, args, kwargs);
        }
    }
    invoke::call_with(module, args, kwargs)
}

/// Calls a module of an instrumented class as its plain class would.
pub fn call_plain<'py>(
    module: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = module
        .getattr(intern!(module.py(), "__class__"))?
        .getattr(intern!(module.py(), "__call__"))?;
    invoke::call_with_first(&call, module, args, kwargs)
}

/// A method of a class, for one instance.
fn bind<'py>(
    method: &Bound<'py, PyAny>,
    module: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    match method.getattr_opt(intern!(module.py(), "__get__"))? {
        Some(get) => get.call1((module,)),
        None => Ok(method.clone()),
    }
}
