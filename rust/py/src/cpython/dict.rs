//! CPython's dicts, read without a call where possible: every call of a module reads several.

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// Returns `object.__dict__`, bypassing any `__getattribute__`.
pub fn instance_dict<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: `object` is a live object, the context is null as the function requires; it returns
    // a new reference, or null with an exception set.
    let dict = unsafe {
        Bound::from_owned_ptr_or_err(
            object.py(),
            ffi::PyObject_GenericGetDict(object.as_ptr(), ptr::null_mut()),
        )
    }?;
    Ok(dict.cast_into()?)
}

/// True if a value is None or an empty dict.
pub fn none_or_empty(value: &Bound<'_, PyAny>) -> bool {
    match value.cast::<PyDict>() {
        #[cfg(not(Py_GIL_DISABLED))]
        // SAFETY: a live dict. A call for its length costs as much as finding the dict.
        Ok(dict) => unsafe { (*dict.as_ptr().cast::<ffi::PyDictObject>()).ma_used == 0 },
        #[cfg(Py_GIL_DISABLED)]
        Ok(dict) => dict.is_empty(),
        Err(_) => value.is_none(),
    }
}

/// Looks `name` up, at the end of `dict` first.
pub fn get_last<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    get_at(dict, name, dict.len().cast_signed() - 1)
}

/// Variable of a module or an object: its name, and its likely position in the dict.
pub struct Variable {
    pub name: Py<PyString>,
    position: ffi::Py_ssize_t,
}

impl Variable {
    /// Takes the position from `example`.
    pub fn like_in(example: &Bound<'_, PyDict>, name: &str) -> Self {
        let name = PyString::intern(example.py(), name);
        let position = example.keys().index(&name);
        Self {
            name: name.unbind(),
            position: position.map_or(ffi::Py_ssize_t::MAX, usize::cast_signed),
        }
    }

    /// True if the variable is missing, None or an empty dict.
    pub fn missing_or_empty(&self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        Ok(self.get(dict)?.is_none_or(|value| none_or_empty(&value)))
    }

    /// Looks the variable up.
    pub fn get<'py>(&self, dict: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyAny>>> {
        get_at(dict, self.name.bind(dict.py()), self.position)
    }
}

/// Looks `name` up, at `position` first.
// A hit costs a third of a look-up by hash; a miss falls back to that.
#[cfg(not(Py_GIL_DISABLED))]
fn get_at<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
    mut position: ffi::Py_ssize_t,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: `dict` and `name` are live objects of these types; a position outside of the dict
    // finds nothing. The GIL is held, so the dict keeps the value alive until it is counted.
    unsafe {
        if ffi::PyDict_Next(
            dict.as_ptr(),
            &raw mut position,
            &raw mut key,
            &raw mut value,
        ) == 0
            || key != name.as_ptr()
        {
            value = ffi::PyDict_GetItemWithError(dict.as_ptr(), name.as_ptr());
        }
        if value.is_null() && !ffi::PyErr_Occurred().is_null() {
            return Err(PyErr::fetch(dict.py()));
        }
        Ok(Bound::from_borrowed_ptr_or_opt(dict.py(), value))
    }
}

/// Looks `name` up; free-threaded, as other threads may change the dict meanwhile.
#[cfg(Py_GIL_DISABLED)]
fn get_at<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
    _position: ffi::Py_ssize_t,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    dict.get_item(name)
}
