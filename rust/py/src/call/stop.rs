//! `Stop`: ends a call from inside its module.

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;

pyo3::create_exception!(
    ferrohook._core,
    Stop,
    PyBaseException,
    "Ends the call of a module early; the call catches it. Its arguments are the id of the \
     module's registry and the value that the call returns."
);

/// Returns the value of a call that `error` ends, if it is a `Stop` for the module with this id.
#[cold]
pub fn stopped<'py>(py: Python<'py>, error: &PyErr, module: u64) -> Option<Bound<'py, PyAny>> {
    if !error.is_instance_of::<Stop>(py) {
        return None;
    }
    let arguments = error.value(py).getattr("args").ok()?;
    let (id, value): (u64, Bound<'_, PyAny>) = arguments.extract().ok()?;
    (id == module).then_some(value)
}
