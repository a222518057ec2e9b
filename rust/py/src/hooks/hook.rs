//! A registered Python hook: how it is called and what happens when it fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferrohook_core::{Entry, Phase, Placement};
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::capture::recorder::Recorder;
use crate::error::{hook_type_error, type_name};
use crate::native::detectors::NativeDetector;
use crate::native::point::PointHook;
use crate::native::typed::TypedHook;
use crate::registry::Registry;

/// A phase, from its name.
pub struct PhaseName(pub Phase);

impl<'py> FromPyObject<'_, 'py> for PhaseName {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = object.cast::<PyString>().map_err(|_| {
            hook_type_error(
                object.py(),
                format!("phase is a str, got {}", type_name(&object)),
            )
        })?;
        Phase::from_name(&name.to_cow()?).map(Self).ok_or_else(|| {
            PyValueError::new_err(format!(
                "unknown phase {:?}: expected one of {}",
                name.to_string(),
                Phase::ALL.map(Phase::name).join(", ")
            ))
        })
    }
}

/// What a call does about a hook's exception.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    Raise,
    Disable,
    Ignore,
}

impl<'py> FromPyObject<'_, 'py> for OnError {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = object.cast::<PyString>().map_err(|_| {
            hook_type_error(
                object.py(),
                format!("on_error is a str, got {}", type_name(&object)),
            )
        })?;
        match &*name.to_cow()? {
            "raise" => Ok(Self::Raise),
            "disable" => Ok(Self::Disable),
            "ignore" => Ok(Self::Ignore),
            other => Err(PyValueError::new_err(format!(
                "unknown on_error {other:?}: expected one of raise, disable, ignore"
            ))),
        }
    }
}

/// A priority: an int, and no bool.
#[derive(Clone, Copy)]
pub struct Priority(pub i64);

impl<'py> FromPyObject<'_, 'py> for Priority {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyInt>() && !object.is_instance_of::<PyBool>() {
            return object.extract().map(Self).map_err(|_| {
                PyValueError::new_err(format!(
                    "priority lies between -2**63 and 2**63 - 1, got {}",
                    *object
                ))
            });
        }
        Err(hook_type_error(
            object.py(),
            format!("priority is an int, got {}", type_name(&object)),
        ))
    }
}

impl Priority {
    pub fn place(self, prepend: bool) -> Placement {
        Placement {
            priority: self.0,
            prepend,
        }
    }
}

/// What a hook was registered with.
#[derive(Clone, Copy)]
pub struct Options {
    pub with_kwargs: bool,
    pub always_call: bool,
    pub on_error: OnError,
    /// Count the time spent in the hook.
    pub timed: bool,
}

impl Options {
    /// Whether a trace of the calls alone, without what happens when they fail, is true to these.
    pub fn traceable(self) -> bool {
        !self.always_call && self.on_error == OnError::Raise
    }
}

impl From<OnError> for Options {
    fn from(on_error: OnError) -> Self {
        Self {
            with_kwargs: false,
            always_call: false,
            on_error,
            timed: false,
        }
    }
}

/// The callback of a registry's entry.
pub struct Hook {
    /// As it was given: a callable, a [`TypedHook`], a [`Recorder`] or a [`NativeDetector`].
    given: Py<PyAny>,
    kind: Kind,
    pub options: Options,
    times: Option<Box<Times>>,
}

/// What few hooks have.
struct Times {
    /// The nanoseconds spent in it, where they are counted.
    spent: Option<AtomicU64>,
    /// Has the module timed for as long as the hook is there.
    _clock: Option<Clock>,
}

/// One of those who want to know how long a module runs.
struct Clock(Arc<AtomicUsize>);

impl Clock {
    fn start(clocks: &Arc<AtomicUsize>) -> Self {
        // Relaxed, as below: a call that reads the count too early or too late is one that was
        // under way.
        clocks.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(clocks))
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Typed,
    Recorder,
    Point,
    Detector,
}

/// What a hook's turn comes down to.
#[derive(Clone, Copy)]
pub enum Callback<'a, 'py> {
    /// PyTorch's contract.
    Plain(&'a Bound<'py, PyAny>),
    /// The callback of a typed hook.
    Typed(&'a Bound<'py, PyAny>),
    /// Run in Rust.
    Recorder(&'a Bound<'py, Recorder>),
    Detector(&'a Bound<'py, NativeDetector>),
    /// PyTorch's contract too, and what Rust can call more directly.
    Point(&'a Bound<'py, PointHook>),
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
    /// Refuses what can't be called for `phase` as `options` say; counts itself in `clocks` where
    /// it needs to know how long the module runs.
    pub fn new(
        given: &Bound<'_, PyAny>,
        phase: Phase,
        options: Options,
        clocks: &Arc<AtomicUsize>,
    ) -> PyResult<Self> {
        let py = given.py();
        let mut times = false;
        let (kind, of) = if let Ok(typed) = given.cast::<TypedHook>() {
            (Kind::Typed, typed.get().phase)
        } else if let Ok(recorder) = given.cast::<Recorder>() {
            (Kind::Recorder, recorder.get().phase())
        } else if phase == Phase::Forward
            && let Ok(hook) = given.cast::<PointHook>()
            && hook.get().under_own_name()
        {
            (Kind::Point, phase)
        } else if let Ok(detector) = given.cast::<NativeDetector>() {
            times = detector.get().times();
            (Kind::Detector, detector.get().phase().unwrap_or(phase))
        } else {
            (Kind::Plain, phase)
        };
        if of != phase {
            return Err(hook_type_error(
                py,
                format!(
                    "{} is a hook for the phase {of}, it cannot be registered for {phase}",
                    type_name(given)
                ),
            ));
        }
        if matches!(kind, Kind::Typed | Kind::Recorder | Kind::Detector) && options.with_kwargs {
            return Err(hook_type_error(
                py,
                format!(
                    "{} fixes the arguments of its callback: with_kwargs is for plain callables",
                    type_name(given)
                ),
            ));
        }
        if kind == Kind::Plain && !given.is_callable() {
            return Err(hook_type_error(
                py,
                format!("a {phase} hook is a callable, got {}", type_name(given)),
            ));
        }
        Ok(Self {
            given: given.clone().unbind(),
            kind,
            options,
            times: (options.timed || times).then(|| {
                Box::new(Times {
                    spent: options.timed.then(AtomicU64::default),
                    _clock: times.then(|| Clock::start(clocks)),
                })
            }),
        })
    }

    /// The object that the registry owns, for listing, copying and garbage collection.
    pub fn given(&self) -> &Py<PyAny> {
        &self.given
    }

    #[inline]
    pub fn callback<'a, 'py>(&'a self, py: Python<'py>) -> Callback<'a, 'py> {
        let given = self.given.bind(py);
        // The kind spares plain hooks the check of their type.
        match self.kind {
            Kind::Plain => Callback::Plain(given),
            Kind::Typed => given
                .cast::<TypedHook>()
                .map_or(Callback::Plain(given), |typed| {
                    Callback::Typed(typed.get().callback.bind(py))
                }),
            Kind::Recorder => given
                .cast::<Recorder>()
                .map_or(Callback::Plain(given), Callback::Recorder),
            Kind::Point => given
                .cast::<PointHook>()
                .map_or(Callback::Plain(given), Callback::Point),
            Kind::Detector => given
                .cast::<NativeDetector>()
                .map_or(Callback::Plain(given), Callback::Detector),
        }
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

/// What a hook's failing needs to be told with.
pub struct Site<'a, 'py> {
    pub entry: &'a Entry<Hook>,
    pub module: &'a Bound<'py, PyAny>,
    pub registry: &'a Registry,
}

impl Site<'_, '_> {
    fn py(&self) -> Python<'_> {
        self.module.py()
    }

    /// Names hook, phase and module.
    fn describe(&self) -> String {
        let callback = match self.entry.hook().callback(self.py()) {
            Callback::Plain(callback) | Callback::Typed(callback) => callback,
            Callback::Recorder(recorder) => recorder.as_any(),
            Callback::Point(hook) => hook.as_any(),
            Callback::Detector(detector) => detector.as_any(),
        };
        let name = callback
            .getattr("__qualname__")
            .and_then(|name| name.extract::<String>())
            .unwrap_or_else(|_| format!("an instance of {}", type_name(callback)));
        let module = self
            .module
            .call_method0("_get_name")
            .and_then(|name| name.extract::<String>())
            .unwrap_or_else(|_| type_name(self.module));
        format!(
            "the {} hook {name} (id {}) of {module}",
            self.entry.phase(),
            self.entry.id()
        )
    }

    /// A typed hook did what its type forbids.
    pub fn type_error(&self, expected: &str, got: &Bound<'_, PyAny>) -> PyErr {
        hook_type_error(
            self.py(),
            format!(
                "{} {expected}, it returned {}",
                self.describe(),
                type_name(got)
            ),
        )
    }

    /// Puts the note on an exception that left the hook.
    pub fn annotate(&self, error: &PyErr) {
        let note = format!("ferrohook: raised by {}", self.describe());
        // An exception class may forbid notes; the exception itself matters more.
        let _ = error.value(self.py()).call_method1("add_note", (note,));
    }

    /// Applies the hook's `on_error` to what came out of it; `None` where the call goes on without
    /// the hook.
    pub fn settle<T>(&self, result: PyResult<Option<T>>) -> PyResult<Option<T>> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let py = self.py();
        self.annotate(&error);
        // What is no Exception (KeyboardInterrupt, SystemExit) is not the hook's fault.
        if !error.is_instance_of::<PyException>(py) {
            return Err(error);
        }
        self.registry.count_error();
        let policy = self.entry.hook().options.on_error;
        if policy == OnError::Raise {
            return Err(error);
        }
        // Several threads may fail at once: one of them disables, and that one logs.
        if policy == OnError::Disable && self.entry.disable() {
            let message = format!("disabled {}: it raised", self.describe());
            if let Err(unlogged) = log_error(py, &message, &error) {
                unlogged.write_unraisable(py, None);
            }
        }
        Ok(None)
    }

    /// Says that a hook failed while another exception was on its way, which stays the one that
    /// the caller gets.
    pub fn warn_silenced(&self, error: &PyErr) {
        let py = self.py();
        let text = format!(
            "{} raised {}, silenced as another exception was raised before",
            self.describe(),
            error
                .value(py)
                .repr()
                .map_or_else(|_| "?".to_owned(), |repr| repr.to_string())
        );
        let warned = py
            .import("warnings")
            .and_then(|warnings| warnings.call_method1("warn", (text,)));
        if let Err(error) = warned {
            error.write_unraisable(py, None);
        }
    }
}

fn log_error(py: Python<'_>, message: &str, error: &PyErr) -> PyResult<()> {
    static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let logger = LOGGER.get_or_try_init(py, || {
        py.import("logging")?
            .call_method1("getLogger", ("ferrohook",))
            .map(Bound::unbind)
    })?;
    let kwargs = pyo3::types::PyDict::new(py);
    kwargs.set_item("exc_info", error.value(py))?;
    logger
        .bind(py)
        .call_method("error", ("%s", message), Some(&kwargs))?;
    Ok(())
}
