//! Native detectors: hooks that observe values in Rust and accumulate statistics.
//!
//! Each turn becomes statistics of its own, outside any lock; the lock is held to merge them, as
//! `merge` does for other threads and processes. Memory of a plain, contiguous CPU tensor is read in
//! place, from 16,384 numbers on without the interpreter, by loops that are compiled for AVX2 too.
//! `reductions.py` computes the rest; numbers of a GPU arrive by a copy into pinned memory and an
//! event, and stay listed as pending until merged, so that two readers at once both see them.

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

/// Statistics of one kind of detector.
trait Statistics: Clone + Default + Send + Sized + 'static {
    /// True if it needs the run time of the module.
    const TIMES: bool = false;

    /// Adds one invocation.
    fn observe(shared: &Shared<Self>, turn: &Turn<'_, '_>) -> PyResult<()>;

    /// Waits for pending results of devices and adds them.
    fn await_pending(_shared: &Shared<Self>, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// Adds the statistics of another detector.
    fn merge(&mut self, other: &Self);

    /// Writes them into a dict, for `snapshot()`.
    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()>;

    /// Converts them to plain Python data, for `load`.
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self>;
}

/// Statistics shared between threads.
#[derive(Default)]
struct Shared<S> {
    statistics: Mutex<S>,
    /// Pending results of devices.
    awaited: elements::Awaited,
}

/// Detector of any kind (type-erased).
trait Detect: Send + Sync {
    fn times(&self) -> bool;
    fn observe(&self, turn: &Turn<'_, '_>) -> PyResult<()>;
    fn as_any(&self) -> &(dyn Any + Send + Sync);
    /// Adds the statistics of another detector; false if it is of another kind.
    fn merge(&self, py: Python<'_>, other: &dyn Detect) -> PyResult<bool>;
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>>;
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
    fn load(&self, saved: &Bound<'_, PyAny>) -> PyResult<()>;
}

impl<S: Statistics> Shared<S> {
    /// Returns a copy of the statistics, with pending results added.
    fn complete(&self, py: Python<'_>) -> PyResult<S> {
        S::await_pending(self, py)?;
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
        // One lock after the other: two detectors merged into each other at once cannot deadlock.
        let other = other.complete(py)?;
        self.statistics.lock().merge(&other);
        Ok(true)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.complete(py)?.describe(&dict)?;
        Ok(dict)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.complete(py)?.save(py)
    }

    fn load(&self, saved: &Bound<'_, PyAny>) -> PyResult<()> {
        let loaded = S::load(saved)?;
        let _old = std::mem::replace(&mut *self.statistics.lock(), loaded);
        Ok(())
    }
}

/// Base of the native detectors: hooks that observe the values of a module without running Python,
/// and accumulate statistics.
///
/// They are registered like any other hook, on one module or on many, by `register` or a
/// `register_*_hook` method, for the phase to observe: the module's output in `forward`, its input
/// in `forward_pre`, gradients in the backward phases. Any number of threads may call, read and
/// merge them; copies and pickles include the statistics.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct NativeDetector {
    detector: Box<dyn Detect>,
}

impl NativeDetector {
    /// Makes a detector of class `T`, which adds no fields, with initial statistics.
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

    // It reads memory, which a graph cannot express.
    fn traced<'py>(slf: &Bound<'py, Self>, _phase: Phase) -> PyResult<Option<Traced<'py>>> {
        Ok(Some(Traced {
            callback: slf.as_any().clone(),
            kind: "detector",
            with_kwargs: false,
            faithful: false,
            operator: None,
        }))
    }
}

#[pymethods]
impl NativeDetector {
    /// Returns the statistics so far, as plain data.
    ///
    /// It includes every call that has returned, and waits for pending results of a GPU.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.detector.snapshot(py)
    }

    /// Adds the statistics of another detector of the same class.
    ///
    /// Args:
    ///     other: the other detector, of this process or unpickled; it is not changed.
    ///
    /// Raises:
    ///     HookTypeError: `other` is of another class.
    ///     HookError: `other` is the detector itself, which would count everything twice.
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
