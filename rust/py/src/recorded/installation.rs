//! `InstallationBase`: what recording put into one model.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::capture::collector::Collector;
use crate::recorded::tree::ModuleTree;

/// The native half of an `Installation`: what recording put into one model.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct InstallationBase {
    /// For each key an empty collector of that name, which keeps tensors as the recorders say.
    pub keys: Vec<Py<Collector>>,
    /// The model's modules as they were.
    tree: Py<ModuleTree>,
    /// The copies from GPUs that there may be.
    copies: Option<Py<PyAny>>,
    /// How many want the layers watched: where nobody does, they cost nothing.
    watching: AtomicUsize,
    retired: AtomicBool,
}

#[pymethods]
impl InstallationBase {
    #[new]
    fn new(keys: Vec<Py<Collector>>, tree: Py<ModuleTree>, copies: Option<Py<PyAny>>) -> Self {
        Self {
            keys,
            tree,
            copies,
            watching: AtomicUsize::new(0),
            retired: AtomicBool::new(false),
        }
    }

    /// True if the model still is as it was.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        self.tree.get().holds(py)
    }

    /// True if it is to be taken out of the model when the calls in progress have ended.
    #[getter(retired)]
    fn py_retired(&self) -> bool {
        self.retired()
    }

    #[setter(retired)]
    fn set_retired(&self, retired: bool) {
        self.retired.store(retired, Ordering::Release);
    }

    /// Has the layers watched for good: a graph has their hooks in it.
    pub fn watch(&self) {
        // Relaxed, as below: the layers of a call run in its own thread, or in those that this one
        // told of it.
        self.watching.fetch_add(1, Ordering::Relaxed);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.copies)?;
        self.keys.iter().try_for_each(|key| visit.call(key))
    }
}

impl InstallationBase {
    /// True if somebody wants the layers watched: one atomic read.
    pub fn watched(&self) -> bool {
        self.watching.load(Ordering::Relaxed) != 0
    }

    pub fn retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    pub fn unwatch(&self) {
        self.watching.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn finish_copies(&self, py: Python<'_>) -> PyResult<()> {
        let copies = self.copies.as_ref();
        copies.map_or(Ok(()), |copies| {
            copies.call_method0(py, intern!(py, "finish")).map(drop)
        })
    }
}

/// What recording put into each model, by the models' ids.
pub fn installations(py: Python<'_>) -> &Bound<'_, PyDict> {
    static ALL: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    ALL.get_or_init(py, || PyDict::new(py).unbind()).bind(py)
}
