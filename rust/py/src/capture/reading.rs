//! Captured values by name, as they are read: plain ones without a Python frame, others in Python.

use pyo3::exceptions::PyKeyError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::capture::collector::Collector;

/// Base of views of captured values.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct CapturedBase {
    /// Captures of the last call of each name: index of each name in the collector.
    last: Vec<(Py<PyDict>, Py<Collector>)>,
}

#[pymethods]
impl CapturedBase {
    #[new]
    fn new(last: Vec<(Py<PyDict>, Py<Collector>)>) -> Self {
        Self { last }
    }

    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        name: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        for (indices, collector) in &slf.get().last {
            let Some(index) = indices.bind(py).get_item(name)? else {
                continue;
            };
            if let Some(value) = collector.get().plain(py, index.extract()?)? {
                return Ok(value);
            }
        }
        slf.call_method1(intern!(py, "_read"), (name,))
    }

    // No `__clear__`: collectors have one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.last.iter().try_for_each(|(indices, collector)| {
            visit.call(indices)?;
            visit.call(collector)
        })
    }
}

/// Base of caches of activations.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct CacheBase {
    /// Mapping from names to values.
    #[pyo3(get, name = "_activations")]
    activations: Py<PyAny>,
}

#[pymethods]
impl CacheBase {
    #[new]
    #[pyo3(signature = (activations, *_others, **_named))]
    fn new(
        activations: Py<PyAny>,
        _others: &Bound<'_, PyTuple>,
        _named: Option<&Bound<'_, PyDict>>,
    ) -> Self {
        Self { activations }
    }

    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        name: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let found = slf.get().activations.bind(py).get_item(name);
        found.or_else(|error| {
            if !error.is_instance_of::<PyKeyError>(py) {
                return Err(error);
            }
            slf.call_method1(intern!(py, "_missing"), (name, error.value(py)))
        })
    }

    // No `__clear__`: a mapping has one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.activations)
    }
}
