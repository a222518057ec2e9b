//! Native detectors: hooks that observe values in Rust and accumulate statistics.
//!
//! Each turn computes its statistics outside any lock; the lock is held to merge them, as
//! `merge` does for other threads and processes. Memory of a plain, contiguous CPU tensor is read in
//! place, from 16,384 numbers on without the interpreter, by loops that are compiled for AVX2 too.
//! `reductions.py` computes the rest; numbers of a GPU arrive by a copy into pinned memory and an
//! event, and stay listed as pending until merged, so that two readers at once both see them.
//!
//! A detector that `register` puts on modules by name has one sub-detector for each of them.

mod counters;
mod elements;
mod memory;

use std::any::Any;

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyList, PyString, PyType};
use pyo3::{PyClass, PyClassInitializer};

pub use counters::{CallCounter, LatencyDetector, ShapeDetector};
pub use elements::{NonFiniteDetector, NormDetector};

use crate::error::{hook_error, hook_type_error, type_name};
use crate::hooks::native::{Native, NativeHook, Outcome, Trace, Traced, Turn};

/// Statistics of one kind of detector.
trait Statistics: Clone + Default + Send + Sized + 'static {
    /// True if it needs the run time of the module.
    const TIMES: bool = false;

    /// Adds one invocation.
    fn observe(shared: &SharedStatistics<Self>, turn: &Turn<'_, '_>) -> PyResult<()>;

    /// Waits for pending results of devices and adds them.
    fn await_pending(_shared: &SharedStatistics<Self>, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// Adds the statistics of another detector.
    fn merge(&mut self, other: &Self);

    /// Statistics of nothing, with the same options.
    fn empty(&self) -> Self {
        Self::default()
    }

    /// Place in the process-wide order of the first observation that mattered, if any.
    fn first(&self) -> Option<u64> {
        None
    }

    /// Writes them into a dict, for `snapshot()`.
    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()>;

    /// Converts them to plain Python data, for `load`.
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self>;
}

/// Statistics shared between threads.
struct SharedStatistics<S> {
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
    /// Makes a copy.
    fn copied(&self, py: Python<'_>) -> PyResult<Box<dyn Detect>>;
    /// See [`Statistics::first`].
    fn first(&self, py: Python<'_>) -> PyResult<Option<u64>>;
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>>;
    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
    /// Saves statistics of nothing, with the same options.
    fn save_empty<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
    fn load(&self, saved: &Bound<'_, PyAny>) -> PyResult<()>;
}

impl<S: Statistics> SharedStatistics<S> {
    fn of(statistics: S) -> Self {
        Self {
            statistics: Mutex::new(statistics),
            awaited: elements::Awaited::default(),
        }
    }

    /// Returns a copy of the statistics, with pending results added.
    fn complete(&self, py: Python<'_>) -> PyResult<S> {
        S::await_pending(self, py)?;
        Ok(self.statistics.lock().clone())
    }
}

impl<S: Statistics> Detect for SharedStatistics<S> {
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

    fn copied(&self, py: Python<'_>) -> PyResult<Box<dyn Detect>> {
        Ok(Box::new(Self::of(self.complete(py)?)))
    }

    fn first(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.complete(py)?.first())
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.complete(py)?.describe(&dict)?;
        Ok(dict)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.complete(py)?.save(py)
    }

    fn save_empty<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let empty = self.statistics.lock().empty();
        empty.save(py)
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
    /// Statistics of calls of modules without a name here.
    own: Box<dyn Detect>,
    /// Detectors of the modules with a name, by name, in the order of their registration.
    ///
    /// Not shown to the garbage collector: they refer to no other object.
    modules: Py<PyDict>,
}

/// Place of the first observation that mattered, if any; name of the module; its detector.
type Placed<'py> = (Option<u64>, String, Bound<'py, NativeDetector>);

impl NativeDetector {
    /// Makes a detector of class `T`, which adds no fields, with initial statistics.
    fn with<T, S: Statistics>(py: Python<'_>, class: T, statistics: S) -> PyClassInitializer<T>
    where
        T: PyClass<BaseType = Self>,
    {
        let detector = Self {
            own: Box::new(SharedStatistics::of(statistics)),
            modules: PyDict::new(py).unbind(),
        };
        PyClassInitializer::from((detector, NativeHook::of::<Self>())).add_subclass(class)
    }

    /// Returns the detector of the module of this name; makes it first if need be.
    fn module<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, Self>> {
        let (py, detector) = (slf.py(), slf.get());
        let modules = detector.modules.bind(py);
        if let Some(found) = modules.get_item(name)? {
            return Ok(found.cast_into()?);
        }
        let made = slf.get_type().call0()?.cast_into::<Self>()?;
        made.get().own.load(&detector.own.save_empty(py)?)?;
        // Another thread may have made one meanwhile.
        let made = modules.call_method1(intern!(py, "setdefault"), (name, made))?;
        Ok(made.cast_into()?)
    }

    /// The detectors of named modules, ordered by their first observations.
    fn in_order<'py>(&self, py: Python<'py>) -> PyResult<Vec<Placed<'py>>> {
        let mut placed = Vec::new();
        for (name, detector) in self.modules.bind(py).copy()? {
            let detector = detector.cast_into::<Self>()?;
            let first = detector.get().own.first(py)?;
            placed.push((first, name.extract()?, detector));
        }
        placed.sort_by_key(|(first, ..)| first.unwrap_or(u64::MAX));
        Ok(placed)
    }

    /// Name of the module of the first observation that mattered.
    fn first(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let first = self.in_order(py)?.into_iter().next();
        Ok(first.and_then(|(first, name, _)| first.map(|_| name)))
    }
}

impl Native for NativeDetector {
    fn phase(&self) -> Option<Phase> {
        self.times().then_some(Phase::Forward)
    }

    fn times(&self) -> bool {
        self.own.times()
    }

    fn for_module(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Py<PyAny>>> {
        let hook = Self::module(object.cast()?, name)?;
        Ok(Some(hook.into_any().unbind()))
    }

    fn run<'py>(&self, _object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        self.own.observe(turn)?;
        Ok(None)
    }

    // It reads memory, which a graph cannot express.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced {
            kind: "detector",
            ..Traced::breaking(object.clone())
        }))
    }
}

#[pymethods]
impl NativeDetector {
    /// Returns the statistics so far, as plain data.
    ///
    /// It includes every call that has returned, and waits for pending results of a GPU.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let total = self.own.copied(py)?;
        for detector in self.modules(py)?.values() {
            total.merge(py, &*detector.cast::<Self>()?.get().own)?;
        }
        total.snapshot(py)
    }

    /// Detectors of the modules that `register` has put this one on by name, by that name. Modules
    /// with the same name in several models share one.
    #[getter]
    fn modules<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.modules.bind(py).copy()
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
            && slf.get().own.merge(py, &*detector.get().own)?
        {
            for (_, name, theirs) in detector.get().in_order(py)? {
                let ours = Self::module(slf, &name)?;
                ours.get().own.merge(py, &*theirs.get().own)?;
            }
            return Ok(());
        }
        Err(hook_type_error(
            py,
            format!(
                "a {name} can only merge another {name}, got {}",
                type_name(other),
                name = type_name(slf)
            ),
        ))
    }

    /// Copies and pickles with the statistics.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyType>, (), Saved<'py>)> {
        let (py, detector) = (slf.py(), slf.get());
        let mut modules = Vec::new();
        // Loading gives them places in this order.
        for (_, name, module) in detector.in_order(py)? {
            modules.push((name, module.get().own.save(py)?));
        }
        Ok((slf.get_type(), (), (detector.own.save(py)?, modules)))
    }

    fn __setstate__(slf: &Bound<'_, Self>, state: Saved<'_>) -> PyResult<()> {
        let (own, modules) = state;
        slf.get().own.load(&own)?;
        for (name, saved) in modules {
            Self::module(slf, &name)?.get().own.load(&saved)?;
        }
        Ok(())
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let mut fields = Vec::new();
        for (name, value) in slf.get().snapshot(slf.py())? {
            if value.is_instance_of::<PyFloat>() {
                let short = value.call_method1(intern!(slf.py(), "__format__"), (".4g",))?;
                fields.push(format!("{name}={short}"));
            } else if !value.is_instance_of::<PyList>() {
                fields.push(format!("{name}={}", value.repr()?));
            }
        }
        if let Some(first) = slf.get().first(slf.py())? {
            fields.push(format!("first={}", PyString::new(slf.py(), &first).repr()?));
        }
        Ok(format!("{}({})", type_name(slf), fields.join(", ")))
    }
}

/// State of a detector: its statistics, and the statistics of its modules by name.
type Saved<'py> = (Bound<'py, PyAny>, Vec<(String, Bound<'py, PyAny>)>);
