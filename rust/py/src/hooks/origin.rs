//! `Origin`: where in a program a hook was registered.

use std::ffi::c_int;

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::cpython::once::Once;

/// Place in Python code: a code object, and the offset of an instruction in it.
///
/// The line is looked up when it is read: registering pays for neither.
pub struct Origin {
    code: Py<PyAny>,
    instruction: c_int,
}

impl Origin {
    /// Finds the call, in code outside of this package, that is in progress; None without one.
    pub fn of_caller(py: Python<'_>) -> PyResult<Option<Self>> {
        // SAFETY: attached; returns a borrowed reference, or null if no Python code runs.
        let frame = unsafe { ffi::PyEval_GetFrame() };
        // SAFETY: a live object, or null.
        let mut frame = unsafe { Bound::from_borrowed_ptr_or_opt(py, frame.cast()) };
        while let Some(current) = frame {
            // SAFETY: a live frame; returns a new reference.
            let code = unsafe {
                let code = ffi::PyFrame_GetCode(current.as_ptr().cast());
                Bound::from_owned_ptr(py, code.cast())
            };
            if !in_package(&code)? {
                // SAFETY: a live frame.
                let instruction = unsafe { ffi::PyFrame_GetLasti(current.as_ptr().cast()) };
                let code = code.unbind();
                return Ok(Some(Self { code, instruction }));
            }
            // SAFETY: a live frame; returns a new reference, or null for the outermost.
            frame = unsafe {
                let back = ffi::PyFrame_GetBack(current.as_ptr().cast());
                Bound::from_owned_ptr_or_opt(py, back.cast())
            };
        }
        Ok(None)
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Self {
        let code = self.code.clone_ref(py);
        Self { code, ..*self }
    }

    /// Name of the file, as its code has it.
    pub fn file<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        file_of(self.code.bind(py))
    }

    /// Number of the line, from 1.
    pub fn line(&self) -> c_int {
        // SAFETY: a live code object; an offset outside of it gives the first line or -1.
        unsafe { ffi::PyCode_Addr2Line(self.code.as_ptr().cast(), self.instruction) }
    }
}

fn file_of<'py>(code: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
    let file = code.getattr(intern!(code.py(), "co_filename"))?;
    Ok(file.cast_into()?)
}

/// True for code of this package.
fn in_package(code: &Bound<'_, PyAny>) -> PyResult<bool> {
    /// Code outside of the package that registered last: many hooks are registered in one loop.
    static LAST: Mutex<Option<Py<PyAny>>> = Mutex::new(None);
    if LAST.lock().as_ref().is_some_and(|last| last.is(code)) {
        return Ok(false);
    }
    let inside = is_in_package(code)?;
    if !inside {
        // Dropped with the lock released: a weak reference to code may have a callback.
        let earlier = LAST.lock().replace(code.clone().unbind());
        drop(earlier);
    }
    Ok(inside)
}

fn is_in_package(code: &Bound<'_, PyAny>) -> PyResult<bool> {
    static FOLDER: Once<String> = Once::new();
    let py = code.py();
    let folder = FOLDER.get_or_try_init(py, || {
        let front: String = py.import("ferrohook")?.getattr("__file__")?.extract()?;
        let end = front.rfind("__init__.").unwrap_or(front.len());
        Ok(front[..end].to_owned())
    })?;
    let file = file_of(code)?;
    // A name that is no UTF-8 is none of ours.
    Ok(file.to_str().is_ok_and(|file| file.starts_with(folder)))
}
