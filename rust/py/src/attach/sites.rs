//! `SitesBase`: what must not be left half-done of the sites of a model.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::attach::attachment::Attachment;
use crate::attach::instrumenting::registry_of;
use crate::contexts::current;
use crate::error::{hook_error, rows_error};
use crate::rows::batch::{BatchBase, count_sites};
use crate::rows::calls::around::forward_of_members;

/// Base of sites: a context manager that closes them at exit.
// Native: in Python, Ctrl-C might land between the start of a method and its effect.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct SitesBase {
    /// Hooks of the sites, which are removed as they are closed.
    #[pyo3(get, name = "_attachment")]
    attachment: Py<Attachment>,
    serving: Mutex<Serving>,
    /// True while they are counted as open.
    counted: AtomicBool,
}

#[derive(Default)]
struct Serving {
    /// The batches that are served, the last one last; each is until it is closed.
    batches: Vec<Py<BatchBase>>,
    closed: bool,
}

impl Serving {
    /// True while another batch is served: one that is closed was interrupted, or left.
    fn another(&self, py: Python<'_>, batch: Option<&Bound<'_, BatchBase>>) -> bool {
        self.batches.iter().any(|serving| {
            let serving = serving.bind(py);
            let same = batch.is_some_and(|batch| batch.is(serving));
            !same && !serving.as_super().get().closed()
        })
    }

    fn serves(&self, batch: &Bound<'_, BatchBase>) -> bool {
        self.batches.iter().any(|serving| batch.is(serving))
    }
}

impl Drop for SitesBase {
    fn drop(&mut self) {
        // Of a model that is gone.
        if *self.counted.get_mut() {
            count_sites(false);
        }
    }
}

#[pymethods]
impl SitesBase {
    #[new]
    #[pyo3(signature = (*_others, **_options))]
    fn new(
        py: Python<'_>,
        _others: &Bound<'_, PyTuple>,
        _options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        Ok(Self {
            attachment: Py::new(py, Attachment::default())?,
            serving: Mutex::default(),
            counted: AtomicBool::new(false),
        })
    }

    /// The batch that was served last; None once its service ended.
    #[getter]
    fn _serving<'py>(&self, py: Python<'py>) -> Option<Bound<'py, BatchBase>> {
        let serving = self.serving.lock();
        Some(serving.batches.last()?.bind(py).clone())
    }

    /// Counts the sites as open, until they are closed.
    fn _count(&self) {
        // Relaxed: see `BatchBase::__enter__`.
        if !self.counted.swap(true, Ordering::Relaxed) {
            count_sites(true);
        }
    }

    /// Begins to serve a batch. `beside`: while others are served too.
    ///
    /// Raises:
    ///     RowsError: another one is served, or they were closed.
    #[pyo3(signature = (batch, *, beside = false))]
    fn _serve(&self, batch: &Bound<'_, BatchBase>, beside: bool) -> PyResult<()> {
        let py = batch.py();
        let mut serving = self.serving.lock();
        let refused = if serving.closed {
            Some("these sites were closed")
        } else if !beside && serving.another(py, Some(batch)) {
            Some("sites serve one batch at a time")
        } else {
            None
        };
        let mut former = Vec::new();
        if refused.is_none() {
            let ended = |it: &mut Py<BatchBase>| it.bind(py).as_super().get().closed();
            former.extend(serving.batches.extract_if(.., ended));
            if !serving.serves(batch) {
                serving.batches.push(batch.clone().unbind());
            }
        }
        drop(serving);
        drop(former); // runs Python code
        refused.map_or(Ok(()), |message| Err(rows_error(py, message)))
    }

    /// Ends the service of a batch.
    fn _end(&self, batch: &Bound<'_, BatchBase>) {
        let mut serving = self.serving.lock();
        let is_it = |it: &mut Py<BatchBase>| batch.is(&*it);
        let former: Vec<_> = serving.batches.extract_if(.., is_it).collect();
        drop(serving);
        drop(former); // runs Python code
    }

    /// The batch of this context, if it is served.
    fn _batch_here<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, BatchBase>>> {
        let mut found = None;
        for frame in current::active(py)? {
            if let Ok(batch) = frame.cast_into::<BatchBase>()
                && !batch.as_super().get().closed()
            {
                found = Some(batch);
            }
        }
        Ok(found.filter(|batch| self.serving.lock().serves(batch)))
    }

    /// True once they are closed.
    #[getter]
    fn closed(&self) -> bool {
        self.attachment.get().released()
    }

    /// Takes the operators off the modules; a compiled model is compiled anew without them.
    ///
    /// Raises:
    ///     HookError: a batch is entered.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        {
            let mut serving = self.serving.lock();
            if serving.another(py, None) {
                drop(serving);
                let message = "sites cannot be closed while they serve a batch: leave the batch \
                               first";
                return Err(hook_error(py, message));
            }
            serving.closed = true;
        }
        if self.counted.swap(false, Ordering::Relaxed) {
            count_sites(false);
        }
        self.attachment.get().release(py).map(drop)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let serving = self.serving.lock();
        serving
            .batches
            .iter()
            .try_for_each(|batch| visit.call(batch))
    }
}

/// Runs the forward hooks of a batch's members at a module on an output of it, in a graph that has an
/// operator in place of them. None if they do not change it.
#[pyfunction]
pub fn run_forward_hooks<'py>(
    batch: &Bound<'py, BatchBase>,
    module: &Bound<'py, PyAny>,
    output: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    forward_of_members(batch, module, &registry_of(module)?, output)
}
