//! `Activation`: the frames of one context, entered in another for a while.

use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::contexts::current::{active, reset, set};
use crate::contexts::frame::Frame;
use crate::error::hook_error;

/// Context manager that activates a frame, and those around it, in the context that enters it.
///
/// Native: in Python, Ctrl-C might land in the middle.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct Activation {
    frame: Py<Frame>,
    /// Token of the change, while it is entered.
    token: Mutex<Option<Py<PyAny>>>,
}

#[pymethods]
impl Activation {
    #[new]
    fn new(frame: Py<Frame>) -> Self {
        Self {
            frame,
            token: Mutex::default(),
        }
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let Some(frames) = self.frame.get().entered(py) else {
            let message = "activate needs an entered scope: use it inside `with scope`";
            return Err(hook_error(py, message));
        };
        let entered_twice = || {
            let message = "this activation is already entered: call activate() again";
            hook_error(py, message)
        };
        if self.token.lock().is_some() {
            return Err(entered_twice());
        }
        let active = active(py)?;
        let added = frames.iter().filter(|frame| {
            let mut others = active.iter_borrowed();
            !others.any(|other| other.is(frame))
        });
        let all: Vec<_> = active.iter().chain(added).collect();
        let token = set(&PyTuple::new(py, all)?)?;
        let mut slot = self.token.lock();
        if slot.is_none() {
            *slot = Some(token.unbind());
            return Ok(());
        }
        drop(slot);
        reset(&token, "")?;
        Err(entered_twice()) // by another thread
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let token = self.token.lock().as_ref().map(|token| token.clone_ref(py));
        let Some(token) = token else {
            let message = "this activation was not entered, or was already left";
            return Err(hook_error(py, message));
        };
        reset(
            token.bind(py),
            "activate was left in another thread or task: leave it where it was entered",
        )?;
        let _token = self.token.lock().take(); // dropped after the lock is released
        Ok(())
    }

    // No `__clear__`: frames have one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.frame)?;
        visit.call(&*self.token.lock())
    }
}
