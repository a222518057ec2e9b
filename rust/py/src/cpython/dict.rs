//! CPython's dicts, read without a call where that can be: the way of every call leads through several.

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// `object.__dict__`, past any `__getattribute__`.
pub fn instance_dict<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: `object` is a live object and the null context is what the function takes from C; it
    // returns a new reference, or null with an exception set.
    let dict = unsafe {
        Bound::from_owned_ptr_or_err(
            object.py(),
            ffi::PyObject_GenericGetDict(object.as_ptr(), ptr::null_mut()),
        )
    }?;
    Ok(dict.cast_into()?)
}

/// Whether a value is None or an empty dict.
pub fn none_or_empty(value: &Bound<'_, PyAny>) -> bool {
    match value.cast::<PyDict>() {
        #[cfg(not(Py_GIL_DISABLED))]
        // SAFETY: a live dict; asking it by a call costs as much as finding it.
        Ok(dict) => unsafe { (*dict.as_ptr().cast::<ffi::PyDictObject>()).ma_used == 0 },
        #[cfg(Py_GIL_DISABLED)]
        Ok(dict) => dict.is_empty(),
        Err(_) => value.is_none(),
    }
}

/// What `dict` has under `name`; looked for at its end first.
pub fn get_last<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    get_at(dict, name, dict.len().cast_signed() - 1)
}

/// A variable of a module or an object: its name, and where in the dict it is likely to stand.
pub struct Variable {
    pub name: Py<PyString>,
    position: ffi::Py_ssize_t,
}

impl Variable {
    /// The position is where it stands in `example`.
    pub fn like_in(example: &Bound<'_, PyDict>, name: &str) -> Self {
        let name = PyString::intern(example.py(), name);
        let position = example.keys().index(&name);
        Self {
            name: name.unbind(),
            position: position.map_or(ffi::Py_ssize_t::MAX, usize::cast_signed),
        }
    }

    /// Whether `dict` has no such variable, or it is None or an empty dict.
    pub fn missing_or_empty(&self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        Ok(self.get(dict)?.is_none_or(|value| none_or_empty(&value)))
    }

    /// What `dict` has as that variable.
    pub fn get<'py>(&self, dict: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyAny>>> {
        get_at(dict, self.name.bind(dict.py()), self.position)
    }
}

/// What `dict` has under `name`, which is likely to stand at `position`.
// A look there costs a third of a look-up, which finds out if it was the wrong place.
#[cfg(not(Py_GIL_DISABLED))]
fn get_at<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
    mut position: ffi::Py_ssize_t,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: `dict` and `name` are live objects of the types asked for; a position outside of the
    // dict finds nothing. With the GIL held the dict keeps what is found alive until it is counted.
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

/// The same, where others may change the dict meanwhile.
#[cfg(Py_GIL_DISABLED)]
fn get_at<'py>(
    dict: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
    _position: ffi::Py_ssize_t,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    dict.get_item(name)
}
