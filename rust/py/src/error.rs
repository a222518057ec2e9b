//! Conversion of errors into Python exceptions.

use ferrohook_core::WaitError;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Returns a class of `ferrohook.errors`.
fn class_of<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    let class = py.import("ferrohook.errors")?.getattr(name)?;
    Ok(class.cast_into()?)
}

/// Makes an exception of a class in `ferrohook.errors`.
fn of_class(py: Python<'_>, name: &str, message: impl Into<String>) -> PyErr {
    class_of(py, name).map_or_else(
        |error| error,
        |class| PyErr::from_type(class, message.into()),
    )
}

pub fn hook_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "HookError", message)
}

pub fn is_hook_error(py: Python<'_>, error: &PyErr) -> bool {
    class_of(py, "HookError").is_ok_and(|class| error.is_instance(py, &class))
}

pub fn hook_type_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "HookTypeError", message)
}

pub fn selection_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "SelectionError", message)
}

pub fn rows_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "RowsError", message)
}

pub fn stale_activation(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "StaleActivationError", message)
}

pub fn capture_budget(py: Python<'_>, message: impl Into<String>) -> PyErr {
    of_class(py, "CaptureBudgetError", message)
}

pub fn wait_error(py: Python<'_>, error: WaitError) -> PyErr {
    match error {
        WaitError::Inside => hook_error(
            py,
            format!("{error}; remove it without wait=True, or wait from another thread"),
        ),
        WaitError::TimedOut => PyTimeoutError::new_err(error.to_string()),
    }
}

/// Warns where nothing may be raised.
pub fn warn(py: Python<'_>, text: &str) {
    let warned = py
        .import("warnings")
        .and_then(|warnings| warnings.call_method1("warn", (text,)));
    if let Err(error) = warned {
        error.write_unraisable(py, None);
    }
}

/// Returns the name of a module for messages: `(model)` for the empty one, of the model itself.
pub fn shown(name: &str) -> String {
    match name {
        "" => "(model)".to_owned(),
        name => format!("`{name}`"),
    }
}

/// Returns an error with its cause.
pub fn caused(py: Python<'_>, error: PyErr, cause: PyErr) -> PyErr {
    error.set_cause(py, Some(cause));
    error
}

/// Returns an object as Python shows it, for messages.
pub fn repr(object: &Bound<'_, PyAny>) -> String {
    object
        .repr()
        .map_or_else(|_| "?".to_owned(), |repr| repr.to_string())
}

/// Returns the name of an object's type, for messages.
pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
