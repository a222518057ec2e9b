//! `HookOptions`, extracted from Python.

use ferrohook_core::{Phase, Placement};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::error::{hook_type_error, type_name};

/// Casts an argument; `expected` begins the message of the error.
fn expect<'a, 'py, T: pyo3::PyTypeCheck>(
    object: Borrowed<'a, 'py, PyAny>,
    expected: &str,
) -> PyResult<Borrowed<'a, 'py, T>> {
    object.cast::<T>().map_err(|_| {
        let message = format!("{expected}, got {}", type_name(&object));
        hook_type_error(object.py(), message)
    })
}

/// Reads an int, not a bool, in a range that `limits` describes.
pub fn int_of<'a, 'py, T: FromPyObject<'a, 'py>>(
    object: Borrowed<'a, 'py, PyAny>,
    name: &str,
    limits: &str,
) -> PyResult<T> {
    if object.is_instance_of::<PyBool>() {
        let message = format!("{name} must be an int, got bool");
        return Err(hook_type_error(object.py(), message));
    }
    let int = expect::<PyInt>(object, &format!("{name} must be an int"))?;
    let outside = |_| PyValueError::new_err(format!("{name} {limits}, got {}", *int));
    object.extract().map_err(outside)
}

/// Phase, by its name.
pub struct PhaseName(pub Phase);

impl<'py> FromPyObject<'_, 'py> for PhaseName {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = expect::<PyString>(object, "phase must be a str")?;
        Phase::from_name(&name.to_cow()?).map(Self).ok_or_else(|| {
            PyValueError::new_err(format!(
                "unknown phase {:?}: expected one of {}",
                name.to_string(),
                Phase::ALL.map(Phase::name).join(", ")
            ))
        })
    }
}

/// Reaction of a call to a hook's exception.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    Raise,
    Disable,
    Ignore,
}

impl<'py> FromPyObject<'_, 'py> for OnError {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = expect::<PyString>(object, "on_error must be a str")?;
        match &*name.to_cow()? {
            "raise" => Ok(Self::Raise),
            "disable" => Ok(Self::Disable),
            "ignore" => Ok(Self::Ignore),
            other => Err(PyValueError::new_err(format!(
                "unknown on_error {other:?}: expected one of raise, disable, ignore"
            ))),
        }
    }
}

/// Priority: an int, not a bool.
#[derive(Clone, Copy)]
pub struct Priority(pub i64);

impl<'py> FromPyObject<'_, 'py> for Priority {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        int_of(object, "priority", "must be between -2**63 and 2**63 - 1").map(Self)
    }
}

impl Priority {
    pub fn place(self, prepend: bool) -> Placement {
        Placement {
            priority: self.0,
            prepend,
        }
    }
}

/// Options of one hook.
#[derive(Clone, Copy)]
pub struct HookOptions {
    pub with_kwargs: bool,
    pub always_call: bool,
    pub on_error: OnError,
    /// Number of its entry in a plan.
    pub entry: Option<u32>,
}

impl HookOptions {
    /// True if a trace, which has no handling of exceptions, behaves like an eager call.
    pub fn traceable(self) -> bool {
        !self.always_call && self.on_error == OnError::Raise
    }
}

impl From<OnError> for HookOptions {
    fn from(on_error: OnError) -> Self {
        Self {
            with_kwargs: false,
            always_call: false,
            on_error,
            entry: None,
        }
    }
}
