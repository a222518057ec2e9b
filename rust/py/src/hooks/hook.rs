//! `Hook`: a Python callable or a native hook, with its options.

use ferrohook_core::{Handle, Phase, Placement, Registry, Watch};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::{hook_type_error, type_name};
use crate::hooks::callable::{check_call, plain_arguments};
use crate::hooks::native::{AsNative, Native, NativeHook, Traced};
use crate::hooks::options::{HookOptions, OnError};
use crate::hooks::origin::Origin;

/// Callback of a registry's entry.
pub struct Hook {
    /// The object that was registered.
    object: Py<PyAny>,
    /// None for a callable of PyTorch's contract.
    native: Option<AsNative>,
    pub options: HookOptions,
    rare: Option<Box<Rare>>,
    /// Line that registered it; None if no Python code did.
    pub place: Option<Origin>,
    /// The module, if its name is known.
    module: Option<Box<ForModule>>,
}

/// Parts that few hooks have.
struct Rare {
    /// Makes calls time the module while the hook is registered.
    _times: Option<Watch<Hook>>,
    /// Error that disabled the hook by its `on_error`, as text.
    failure: Mutex<Option<String>>,
}

struct ForModule {
    name: String,
    /// Native hook that runs in place of `object`, for this module. It refers to no other object,
    /// so the garbage collector need not see it.
    hook: Option<Py<PyAny>>,
}

impl Hook {
    /// Validates `object` as a hook of `phase` with `options`. A hook that needs it has calls timed
    /// by `registry`, the module's registry for every context. `name` is the module's, if known.
    pub fn new(
        object: &Bound<'_, PyAny>,
        phase: Phase,
        options: HookOptions,
        registry: &Registry<Self>,
        name: Option<&str>,
    ) -> PyResult<Self> {
        let py = object.py();
        let class = object.cast::<NativeHook>().ok().map(|it| it.get().class());
        let native = class.map(|class| class(object)).transpose()?;
        if let Some(native) = native
            && let Some(only) = native.phase()
            && only != phase
        {
            return Err(hook_type_error(
                py,
                format!(
                    "{} only works in {only}: it cannot be registered for {phase}",
                    type_name(object)
                ),
            ));
        }
        let native = native.filter(|native| native.native_in(phase));
        if native.is_some() && options.with_kwargs {
            return Err(hook_type_error(
                py,
                format!(
                    "{} fixes the arguments of its callback: with_kwargs only works with plain \
                     callables",
                    type_name(object)
                ),
            ));
        }
        let backward = matches!(phase, Phase::BackwardPre | Phase::Backward);
        for (given, option, taken) in [
            (options.with_kwargs, "with_kwargs", !backward),
            (options.always_call, "always_call", phase == Phase::Forward),
        ] {
            if given && !taken {
                return Err(hook_type_error(
                    py,
                    format!("{option} does not work with {phase} hooks, which would ignore it"),
                ));
            }
        }
        if native.is_none() {
            if !object.is_callable() {
                let message = if class.is_some() {
                    format!("{} does not work in phase {phase}", object.repr()?)
                } else {
                    format!(
                        "a {phase} hook must be a callable, got {}",
                        type_name(object)
                    )
                };
                return Err(hook_type_error(py, message));
            }
            let arguments = plain_arguments(phase, options.with_kwargs);
            check_call(object, format_args!("a {phase} hook"), arguments)?;
        }
        let times = native.is_some_and(Native::times);
        let own = match (native, name) {
            (Some(native), Some(name)) => native.for_module(object, name)?,
            _ => None,
        };
        let module = name.map(|name| {
            Box::new(ForModule {
                name: name.to_owned(),
                hook: own,
            })
        });
        Ok(Self {
            object: object.clone().unbind(),
            native: class.filter(|_| native.is_some()),
            options,
            rare: (times || options.on_error == OnError::Disable).then(|| {
                Box::new(Rare {
                    _times: times.then(|| registry.time()),
                    failure: Mutex::default(),
                })
            }),
            place: None,
            module,
        })
    }

    /// Adds the hook to a registry.
    pub fn register(
        self,
        py: Python<'_>,
        phase: Phase,
        placement: Placement,
        registry: &Registry<Self>,
    ) -> Handle<Self> {
        if self.native(py).is_some_and(Native::last) {
            registry.register_last(phase, self)
        } else {
            registry.register(phase, self, placement)
        }
    }

    /// Error that disabled the hook by its `on_error`, as text.
    pub fn failure(&self) -> Option<String> {
        self.rare.as_ref()?.failure.lock().clone()
    }

    /// Notes the error that disables the hook; None: it is enabled again.
    pub fn note_failure(&self, error: Option<String>) {
        if let Some(rare) = &self.rare {
            *rare.failure.lock() = error;
        }
    }

    /// The registered object, owned by the registry.
    #[inline]
    pub fn object(&self) -> &Py<PyAny> {
        &self.object
    }

    /// The object that runs: the registered one, or the one that it has for the module.
    pub fn target(&self) -> &Py<PyAny> {
        let own = self.module.as_ref().and_then(|module| module.hook.as_ref());
        own.unwrap_or(&self.object)
    }

    /// Name of the module, if it is known.
    pub fn module_name(&self) -> Option<&str> {
        Some(&self.module.as_ref()?.name)
    }

    /// Finds the native hook that runs; None for a callable of PyTorch's contract.
    #[inline]
    pub fn as_native(&self) -> Option<AsNative> {
        self.native
    }

    /// The registered native hook; None for a callable of PyTorch's contract.
    pub fn native<'a>(&'a self, py: Python<'a>) -> Option<&'a dyn Native> {
        // The object is of the class that it was registered with.
        self.native?(self.object.bind(py)).ok()
    }

    /// See [`Native::hidden`].
    pub fn hidden(&self, py: Python<'_>) -> bool {
        self.native(py).is_some_and(Native::hidden)
    }

    /// True if its calls may change a value.
    pub fn changes(&self, py: Python<'_>) -> bool {
        self.native(py).is_none_or(Native::changes)
    }

    /// True if its calls may run Python code of the user.
    pub fn runs_python(&self, py: Python<'_>) -> bool {
        self.native(py).is_none_or(Native::runs_python)
    }

    /// Object named in errors.
    pub fn named<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        let object = self.object.bind(py);
        let native = self.native(py);
        native.map_or_else(|| object.clone(), |native| native.named(object))
    }

    /// Form of the hook in a trace of `phase`; None if a trace leaves it out.
    pub fn traced<'py>(&self, py: Python<'py>, phase: Phase) -> PyResult<Option<Traced<'py>>> {
        let object = self.object.bind(py);
        let traced = match self.native(py) {
            Some(native) => native.traced(object, phase)?,
            None => Some(Traced::plain(object.clone(), self.options.with_kwargs)),
        };
        Ok(traced.map(|traced| Traced {
            faithful: traced.faithful && self.options.traceable(),
            ..traced
        }))
    }
}
