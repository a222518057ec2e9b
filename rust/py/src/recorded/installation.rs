//! `InstallationBase`: the recorders attached to one model.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;

use crate::capture::collector::Collector;
use crate::recorded::tree::ModuleTree;

/// Native half of an `Installation`: the recorders attached to one model.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct InstallationBase {
    /// One empty collector for each key, with the name of the key and the options of its recorders.
    pub keys: Vec<Py<Collector>>,
    /// Snapshot of the model's modules.
    tree: Py<ModuleTree>,
    /// Pending copies from GPUs, if there may be any.
    copies: Option<Py<PyAny>>,
    /// Count of users that need the layers watched; at 0 the layers return at once.
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

    /// True if the model is unchanged.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        self.tree.get().holds(py)
    }

    /// True if it is to be released once the in-flight calls have ended.
    #[getter(retired)]
    fn py_retired(&self) -> bool {
        self.retired()
    }

    #[setter(retired)]
    fn set_retired(&self, retired: bool) {
        self.retired.store(retired, Ordering::Release);
    }

    /// Has the layers watched: by a call that records, or for good by a graph that holds their
    /// hooks.
    pub fn watch(&self) {
        // Relaxed, as below: the layers of a call run in its own thread, or in threads that it
        // synchronised with.
        self.watching.fetch_add(1, Ordering::Relaxed);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.copies)?;
        self.keys.iter().try_for_each(|key| visit.call(key))
    }
}

impl InstallationBase {
    /// True if the layers are watched: one atomic read.
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
