//! Native detectors: hooks that observe in Rust and keep statistics of the values.

mod counters;
mod elements;
mod memory;

use std::any::Any;

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};
use pyo3::{PyClass, PyClassInitializer};

pub use counters::{CallCounter, LatencyDetector, ShapeDetector};
pub use elements::{NonFiniteDetector, NormDetector};

use crate::error::{hook_error, hook_type_error, type_name};
use crate::hooks::native::{Native, NativeHook, Outcome, Traced, Turn};

/// What one kind of detector keeps.
trait Statistics: Clone + Default + Send + Sized + 'static {
    /// True if it is about how long the module ran.
    const TIMES: bool = false;

    /// Adds one turn.
    fn observe(shared: &Shared<Self>, turn: &Turn<'_, '_>) -> PyResult<()>;

    /// Adds what is still on its way from a device, and waits for it.
    fn settle(_shared: &Shared<Self>, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// Adds those of another detector.
    fn merge(&mut self, other: &Self);

    /// Puts them into a dict, for people and for monitoring.
    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()>;

    /// All of it as plain Python data, from which `load` makes the same.
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self>;
}

/// Statistics that threads add to.
#[derive(Default)]
struct Shared<S> {
    statistics: Mutex<S>,
    /// What devices were asked to compute and was not added yet.
    awaited: elements::Awaited,
}

/// A detector of any kind.
trait Detect: Send + Sync {
    fn times(&self) -> bool;
    fn observe(&self, turn: &Turn<'_, '_>) -> PyResult<()>;
    fn as_any(&self) -> &(dyn Any + Send + Sync);
    /// Adds the statistics of another one; false where it is of another kind.
    fn merge(&self, py: Python<'_>, other: &dyn Detect) -> PyResult<bool>;
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>>;
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
    fn load(&self, saved: &Bound<'_, PyAny>) -> PyResult<()>;
}

impl<S: Statistics> Shared<S> {
    /// The statistics as they are now, complete.
    fn settled(&self, py: Python<'_>) -> PyResult<S> {
        S::settle(self, py)?;
        Ok(self.statistics.lock().clone())
    }
}

impl<S: Statistics> Detect for Shared<S> {
    fn times(&self) -> bool {
        S::TIMES
    }

    fn observe(&self, turn: &Turn<'_, '_>) -> PyResult<()> {
        S::observe(self, turn)
    }

    fn as_any(&self) -> &(dyn Any + Send + Sync) {
        self
    }

    fn merge(&self, py: Python<'_>, other: &dyn Detect) -> PyResult<bool> {
        let Some(other) = other.as_any().downcast_ref::<Self>() else {
            return Ok(false);
        };
        // One lock after the other: two that are merged into each other at once wait for nobody.
        let other = other.settled(py)?;
        self.statistics.lock().merge(&other);
        Ok(true)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.settled(py)?.describe(&dict)?;
        Ok(dict)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.settled(py)?.save(py)
    }

    fn load(&self, saved: &Bound<'_, PyAny>) -> PyResult<()> {
        let loaded = S::load(saved)?;
        let _old = std::mem::replace(&mut *self.statistics.lock(), loaded);
        Ok(())
    }
}

/// The base of the native detectors: hooks that observe what passes a module without any Python in
/// the call, and keep statistics of it.
///
/// They are registered as any other hook, on one module or on many, by `register` or a
/// `register_*_hook` method, for the phase that is to be observed: the module's output in `forward`,
/// its input in `forward_pre`, gradients in the backward phases. They may be called, read and
/// merged from any number of threads; copies and pickles take the statistics along.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct NativeDetector {
    detector: Box<dyn Detect>,
}

impl NativeDetector {
    /// A detector of class `T`, which adds nothing, with the statistics to begin from.
    fn with<T, S: Statistics>(class: T, statistics: S) -> PyClassInitializer<T>
    where
        T: PyClass<BaseType = Self>,
    {
        let detector = Self {
            detector: Box::new(Shared {
                statistics: Mutex::new(statistics),
                awaited: elements::Awaited::default(),
            }),
        };
        PyClassInitializer::from((detector, NativeHook::of::<Self>())).add_subclass(class)
    }
}

impl Native for NativeDetector {
    fn phase(slf: &Bound<'_, Self>) -> Option<Phase> {
        Self::times(slf).then_some(Phase::Forward)
    }

    fn times(slf: &Bound<'_, Self>) -> bool {
        slf.get().detector.times()
    }

    fn run<'py>(slf: &Bound<'py, Self>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        slf.get().detector.observe(turn)?;
        Ok(None)
    }

    // It reads memory, of which a graph knows nothing.
    fn traced<'py>(slf: &Bound<'py, Self>, _phase: Phase) -> PyResult<Option<Traced<'py>>> {
        Ok(Some(Traced {
            callback: slf.as_any().clone(),
            kind: "detector",
            with_kwargs: false,
            faithful: false,
        }))
    }
}

#[pymethods]
impl NativeDetector {
    /// What was seen so far, as plain data.
    ///
    /// Everything is in it that was seen by calls which have returned; what a GPU still computes is
    /// waited for.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.detector.snapshot(py)
    }

    /// Adds what another detector of the same class saw.
    ///
    /// Args:
    ///     other: another one, of this process or unpickled; it stays as it is.
    ///
    /// Raises:
    ///     HookTypeError: of another class.
    ///     HookError: the detector itself, which would count everything twice.
    fn merge(slf: &Bound<'_, Self>, other: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        if slf.is(other) {
            return Err(hook_error(
                py,
                format!(
                    "merging a {} with itself would count everything twice: merge another one",
                    type_name(slf)
                ),
            ));
        }
        if let Ok(detector) = other.cast::<Self>()
            && slf.get().detector.merge(py, &*detector.get().detector)?
        {
            return Ok(());
        }
        Err(hook_type_error(
            py,
            format!(
                "a {name} merges another {name}, got {}",
                type_name(other),
                name = type_name(slf)
            ),
        ))
    }

    /// Copies and pickles with the statistics.
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyType>, (), Bound<'py, PyAny>)> {
        let saved = slf.get().detector.save(slf.py())?;
        Ok((slf.get_type(), (), saved))
    }

    fn __setstate__(&self, state: &Bound<'_, PyAny>) -> PyResult<()> {
        self.detector.load(state)
    }
}
