//! A registered hook: a Python callable or a native hook, with its options.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrohook_core::{Handle, Phase, Placement, Registry, Watch};
use pyo3::prelude::*;

use crate::error::{hook_type_error, type_name};
use crate::hooks::native::{AnyNative, NativeHook, Traced};
use crate::hooks::options::Options;

/// The callback of a registry's entry.
pub struct Hook {
    /// The object that was registered.
    object: Py<PyAny>,
    /// None for a callable of PyTorch's contract.
    native: Option<&'static dyn AnyNative>,
    pub options: Options,
    times: Option<Box<Times>>,
}

/// Clocks, which few hooks have.
struct Times {
    /// The nanoseconds spent in the hook, where they are counted.
    spent: Option<AtomicU64>,
    /// Has the module timed for as long as the hook is there.
    _module: Option<Watch<Hook>>,
}

/// Counts the time until it is dropped.
pub struct Timer<'a> {
    spent: &'a AtomicU64,
    since: Instant,
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let nanoseconds = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: a sum that orders nothing.
        self.spent.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

impl Hook {
    /// Refuses an object that cannot be called for `phase` as `options` say; has calls of the
    /// module, whose hooks for every context are in `registry`, timed where it needs that.
    pub fn new(
        object: &Bound<'_, PyAny>,
        phase: Phase,
        options: Options,
        registry: &Registry<Self>,
    ) -> PyResult<Self> {
        let py = object.py();
        let native = match object.cast::<NativeHook>() {
            Ok(native) => Some(native.get().class()),
            Err(_) => None,
        };
        if let Some(native) = native
            && let Some(only) = native.phase(object)?
            && only != phase
        {
            return Err(hook_type_error(
                py,
                format!(
                    "{} is a hook for the phase {only}, it cannot be registered for {phase}",
                    type_name(object)
                ),
            ));
        }
        let native = match native {
            Some(native) if native.native_in(object, phase)? => Some(native),
            _ => None,
        };
        if native.is_some() && options.with_kwargs {
            return Err(hook_type_error(
                py,
                format!(
                    "{} fixes the arguments of its callback: with_kwargs is for plain callables",
                    type_name(object)
                ),
            ));
        }
        if native.is_none() && !object.is_callable() {
            return Err(hook_type_error(
                py,
                format!("a {phase} hook is a callable, got {}", type_name(object)),
            ));
        }
        let times = match native {
            Some(native) => native.times(object)?,
            None => false,
        };
        Ok(Self {
            object: object.clone().unbind(),
            native,
            options,
            times: (options.timed || times).then(|| {
                Box::new(Times {
                    spent: options.timed.then(AtomicU64::default),
                    _module: times.then(|| registry.time()),
                })
            }),
        })
    }

    /// Adds the hook to a registry.
    pub fn register(
        self,
        phase: Phase,
        placement: Placement,
        registry: &Registry<Self>,
    ) -> Handle<Self> {
        if self.native.is_some_and(AnyNative::last) {
            registry.register_last(phase, self)
        } else {
            registry.register(phase, self, placement)
        }
    }

    /// The object that was registered, which the registry owns.
    #[inline]
    pub fn object(&self) -> &Py<PyAny> {
        &self.object
    }

    /// How it runs in Rust; None for a callable of PyTorch's contract.
    #[inline]
    pub fn native(&self) -> Option<&'static dyn AnyNative> {
        self.native
    }

    /// The object that errors name.
    pub fn named<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let object = self.object.bind(py);
        match self.native {
            Some(native) => native.named(object),
            None => Ok(object.clone()),
        }
    }

    /// The hook in a trace of `phase`; None where it has no part in it.
    pub fn traced<'py>(&self, py: Python<'py>, phase: Phase) -> PyResult<Option<Traced<'py>>> {
        let object = self.object.bind(py);
        let traced = match self.native {
            Some(native) => native.traced(object, phase)?,
            None => Some(Traced::plain(object.clone(), self.options.with_kwargs)),
        };
        Ok(traced.map(|traced| Traced {
            faithful: traced.faithful && self.options.traceable(),
            ..traced
        }))
    }

    /// Counts the time until the timer is dropped, where that was asked for.
    #[inline]
    pub fn start(&self) -> Option<Timer<'_>> {
        let spent = self.times.as_ref()?.spent.as_ref()?;
        let since = Instant::now();
        Some(Timer { spent, since })
    }

    /// The seconds spent in the hook, where they are counted.
    pub fn seconds(&self) -> Option<f64> {
        let spent = self.times.as_ref()?.spent.as_ref()?;
        let spent = spent.load(Ordering::Relaxed);
        Some(Duration::from_nanos(spent).as_secs_f64())
    }
}
