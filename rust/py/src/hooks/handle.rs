//! `HookHandle`: a core handle for Python.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrohook_core::{Handle, Placement, WaitError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::cpython::invoke::detached;
use crate::error::{hook_type_error, type_name, wait_error};
use crate::hooks::changes::Changes;
use crate::hooks::hook::Hook;
use crate::hooks::options::{OnError, PhaseName, Priority};

/// Handle of one registered hook: removes, disables and describes it.
///
/// As a context manager it removes the hook at exit. Dropping it leaves the hook registered.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct HookHandle {
    hook: Handle<Hook>,
    /// Changes of the frame that the hook is of.
    changes: Option<Arc<Changes>>,
}

impl HookHandle {
    /// Makes the handle of a hook; `changes`: change counter of its frame.
    pub fn new(hook: Handle<Hook>, changes: Option<Arc<Changes>>) -> Self {
        Self { hook, changes }
    }

    /// Forgets which error disabled the hook.
    fn clear_failure(&self) {
        self.hook.read(|hook| hook.note_failure(None));
    }

    /// The core handle.
    pub fn hook(&self) -> &Handle<Hook> {
        &self.hook
    }
}

#[pymethods]
impl HookHandle {
    /// Id of the hook: an int, unique in the process, increasing, never reused.
    #[getter]
    fn id(&self) -> u64 {
        self.hook.id().get()
    }

    /// `forward_pre`, `forward`, `backward_pre` or `backward`.
    #[getter]
    fn phase(&self) -> &'static str {
        self.hook.phase().name()
    }

    /// True if the hook was removed.
    #[getter]
    fn removed(&self) -> bool {
        self.hook.removed()
    }

    /// True if the hook fires when its turn comes.
    #[getter]
    fn enabled(&self) -> bool {
        self.hook.enabled()
    }

    /// Error that disabled the hook by its `on_error`, as text; None for a hook that none disabled or
    /// that was removed.
    #[getter]
    fn failure(&self) -> Option<String> {
        let failure = self.hook.read(Hook::failure).flatten();
        failure.filter(|_| !self.hook.enabled())
    }

    /// Number of the hook's calls that have returned or raised, including calls in a checkpointed
    /// forward that backward repeats.
    #[getter]
    fn calls(&self) -> u64 {
        self.hook.calls()
    }

    /// True once `torch.compile` has the hook in a trace, where it may run without being counted.
    #[getter]
    fn traced(&self) -> bool {
        self.hook.traced()
    }

    /// Priority: higher fires first. It can be set; phases that have begun keep their order.
    #[getter]
    fn priority(&self) -> i64 {
        self.hook.priority()
    }

    #[setter]
    fn set_priority(&self, priority: Priority) {
        self.hook.set_priority(priority.0);
        if let Some(changes) = &self.changes {
            changes.note();
        }
    }

    /// Removes the hook: it never starts again. A thread that is inside it goes on to its end.
    ///
    /// Removing it again does nothing.
    ///
    /// Args:
    ///     wait: return once no thread is inside the hook, so that its resources can be freed.
    ///     timeout: seconds to wait at most; None waits for ever.
    ///
    /// Raises:
    ///     HookError: `wait=True` from inside the hook itself; the hook stays registered.
    ///     TimeoutError: a thread was still inside; the hook is removed.
    ///     ValueError: a `timeout` without `wait=True`, or a negative one.
    #[pyo3(signature = (*, wait = false, timeout = None))]
    fn remove(&self, py: Python<'_>, wait: bool, timeout: Option<Timeout>) -> PyResult<()> {
        if !wait {
            if timeout.is_some() {
                return Err(PyValueError::new_err(
                    "timeout= only works with remove(wait=True)",
                ));
            }
            self.hook.remove();
            return Ok(());
        }
        if self.hook.inside() {
            return Err(wait_error(py, WaitError::Inside));
        }
        self.hook.remove();
        wait_interruptibly(py, timeout, |timeout| self.hook.wait_idle(timeout))
    }

    /// Skips the hook until `enable`; its place in the order stays.
    fn disable(&self) {
        if self.hook.enabled() {
            self.clear_failure();
        }
        self.hook.set_enabled(false);
    }

    /// Lets the hook fire again, at its place in the order.
    fn enable(&self) {
        self.clear_failure();
        self.hook.set_enabled(true);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*exc_info))]
    fn __exit__(&self, exc_info: &Bound<'_, PyAny>) {
        let _ = exc_info;
        self.hook.remove();
    }

    fn __repr__(&self) -> String {
        let state = if self.hook.removed() {
            "removed".to_owned()
        } else if self.hook.enabled() {
            "enabled".to_owned()
        } else {
            self.failure().map_or_else(
                || "disabled".to_owned(),
                |error| format!("disabled by on_error after {error}"),
            )
        };
        format!(
            "<HookHandle id={} phase={} {state}, calls={}>",
            self.hook.id(),
            self.hook.phase(),
            self.hook.calls()
        )
    }

    /// Copies and pickles as a handle of a removed hook: a handle acts only on the hook that it was
    /// returned for, and modules that store handles stay picklable.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (&'static str,))> {
        Ok((slf.get_type().getattr("_removed")?, (slf.get().phase(),)))
    }

    /// Makes the handle of a removed hook.
    #[staticmethod]
    #[pyo3(name = "_removed")]
    pub fn none(py: Python<'_>, phase: PhaseName) -> PyResult<Self> {
        // Any callable: it is never called.
        let placeholder = py.get_type::<PyString>();
        let registry = ferrohook_core::Registry::new();
        let options = OnError::Raise.into();
        let hook = Hook::new(placeholder.as_any(), phase.0, options, &registry, None)?;
        let handle = registry.register(phase.0, hook, Placement::default());
        handle.remove();
        Ok(Self::new(handle, None))
    }
}

/// Time limit in seconds.
pub struct Timeout(Duration);

impl<'py> FromPyObject<'_, 'py> for Timeout {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds: f64 = object.extract().map_err(|_| {
            hook_type_error(
                object.py(),
                format!(
                    "timeout must be a number of seconds, got {}",
                    type_name(&object)
                ),
            )
        })?;
        if seconds.is_nan() || seconds < 0.0 {
            return Err(PyValueError::new_err(format!(
                "timeout must be at least 0 seconds, got {seconds}"
            )));
        }
        Ok(Self(
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
        ))
    }
}

/// Waits with the interpreter released, in slices, so that Ctrl-C can interrupt.
pub fn wait_interruptibly(
    py: Python<'_>,
    timeout: Option<Timeout>,
    wait: impl Fn(Option<Duration>) -> Result<(), WaitError> + Sync,
) -> PyResult<()> {
    const SLICE: Duration = Duration::from_millis(50);
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout.0));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        match detached(py, || wait(Some(slice))) {
            Ok(()) => return Ok(()),
            Err(WaitError::TimedOut) if left.is_none_or(|left| left > SLICE) => {
                py.check_signals()?;
            }
            Err(error) => return Err(wait_error(py, error)),
        }
    }
}
