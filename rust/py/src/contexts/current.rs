//! The frames that the current context has entered.

use std::cell::OnceCell;
use std::ffi::CStr;
use std::ptr;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::cpython::once::Once;
use crate::error::{caused, hook_error};

/// Frames of a context that has entered one, and the token that identifies the context among its
/// copies.
pub struct Entered {
    pub frames: Py<PyTuple>,
    pub token: Py<PyAny>,
}

/// The context variable of the entered frames: a tuple, the outermost first.
pub fn variable(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static VARIABLE: Once<Py<PyAny>> = Once::new();
    let none = || PyTuple::empty(py).into_any();
    variable_of(py, &VARIABLE, c"ferrohook_scopes", none)
}

/// Returns the context variable in a static, made when it is first needed.
#[inline]
pub fn variable_of<'py>(
    py: Python<'py>,
    variable: &'static Once<Py<PyAny>>,
    name: &CStr,
    default: impl FnOnce() -> Bound<'py, PyAny>,
) -> PyResult<&'py Bound<'py, PyAny>> {
    variable
        .get_or_try_init(py, || {
            let default = default();
            // SAFETY: a C string and a live object; returns a new reference, or null with an
            // exception set.
            let variable = unsafe {
                Bound::from_owned_ptr_or_err(
                    py,
                    ffi::PyContextVar_New(name.as_ptr(), default.as_ptr()),
                )
            };
            variable.map(Bound::unbind)
        })
        .map(|variable| variable.bind(py))
}

/// Enters a frame: it becomes the innermost of this context.
pub fn enter(frame: &Bound<'_, PyAny>) -> PyResult<Entered> {
    let py = frame.py();
    let frames: Vec<_> = active(py)?.into_iter().chain([frame.clone()]).collect();
    let frames = PyTuple::new(py, frames)?;
    let token = set(&frames)?;
    Ok(Entered {
        frames: frames.unbind(),
        token: token.unbind(),
    })
}

/// Returns the frames of this context.
pub fn active(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    Ok(read(py)?.unwrap_or_else(|| PyTuple::empty(py)))
}

/// Sets the frames of this context. Returns the token of the change.
pub fn set<'py>(frames: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    set_in(variable(frames.py())?, frames)
}

/// Sets a context variable. Returns the token of the change.
pub fn set_in<'py>(
    variable: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, variable) = (value.py(), variable.as_ptr());
    // SAFETY: a context variable and a live object; returns a new reference, or null with an
    // exception set.
    uncollected(|| unsafe {
        Bound::from_owned_ptr_or_err(py, ffi::PyContextVar_Set(variable, value.as_ptr()))
    })
}

/// Undoes the change that returned `token`; a `HookError` of `elsewhere` in another context.
pub fn reset(token: &Bound<'_, PyAny>, elsewhere: &str) -> PyResult<()> {
    let py = token.py();
    let Err(cause) = reset_in(variable(py)?, token) else {
        return Ok(());
    };
    if !cause.is_instance_of::<PyValueError>(py) {
        return Err(cause);
    }
    Err(caused(py, hook_error(py, elsewhere), cause))
}

/// Undoes the change of a context variable that returned `token`.
pub fn reset_in(variable: &Bound<'_, PyAny>, token: &Bound<'_, PyAny>) -> PyResult<()> {
    let variable = variable.as_ptr();
    // SAFETY: a context variable and a live object; returns -1 with an exception set if the object
    // is no token of it, or of another context.
    if uncollected(|| unsafe { ffi::PyContextVar_Reset(variable, token.as_ptr()) }) == 0 {
        return Ok(());
    }
    Err(PyErr::fetch(token.py()))
}

/// Changes the context with the garbage collector off.
///
/// CPython 3.11 collects garbage in allocations. A finaliser that changes the context meanwhile
/// frees the table which `PyContextVar_Set` goes on to read.
fn uncollected<T>(change: impl FnOnce() -> T) -> T {
    // SAFETY: the thread is attached: a `Bound` is at hand in each caller.
    let was_on = cfg!(not(Py_3_12)) && unsafe { ffi::PyGC_Disable() } == 1;
    let done = change();
    if was_on {
        // SAFETY: as above.
        unsafe { ffi::PyGC_Enable() };
    }
    done
}

/// Returns the tuple without one of its objects.
pub fn without<'py>(
    frames: &Bound<'py, PyTuple>,
    one: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let others = frames.iter_borrowed().filter(|each| !each.is(one));
    PyTuple::new(frames.py(), others.collect::<Vec<_>>())
}

/// True if a tuple holds the objects of another but for one.
pub fn same_without(
    first: &Bound<'_, PyTuple>,
    second: &Bound<'_, PyTuple>,
    one: &Bound<'_, PyAny>,
) -> bool {
    let others = second.iter_borrowed().filter(|each| !each.is(one));
    first
        .iter_borrowed()
        .map(Borrowed::as_ptr)
        .eq(others.map(Borrowed::as_ptr))
}

/// Reads a context variable; None if it is unset or None.
#[expect(clippy::inline_always, reason = "part of each call in a scope")]
#[inline(always)]
pub fn get<'py>(variable: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = variable.py();
    let none = py.None();
    let mut value = ptr::null_mut();
    // SAFETY: a context variable and a default; returns a new reference, or -1 with an exception
    // set.
    let value = unsafe {
        if ffi::PyContextVar_Get(variable.as_ptr(), none.as_ptr(), &raw mut value) < 0 {
            return Err(PyErr::fetch(py));
        }
        Bound::from_owned_ptr(py, value)
    };
    Ok((!value.is_none()).then_some(value))
}

/// Reads the context variable; None if no frame is entered.
fn read(py: Python<'_>) -> PyResult<Option<Bound<'_, PyTuple>>> {
    let Some(frames) = get(variable(py)?)? else {
        // CPython caches a context variable that was set; an unset one costs a full look-up per call.
        set(&PyTuple::empty(py))?;
        return Ok(None);
    };
    let frames = frames.cast_into::<PyTuple>()?;
    Ok((!frames.is_empty()).then_some(frames))
}

/// Frames of the context that a call runs in, looked up when first needed.
#[derive(Default)]
pub struct Frames<'py>(OnceCell<Option<Bound<'py, PyTuple>>>);

impl<'py> Frames<'py> {
    /// Uses these frames, whatever the current context.
    pub fn fixed(frames: Bound<'py, PyTuple>) -> Self {
        Self(OnceCell::from((!frames.is_empty()).then_some(frames)))
    }

    /// Returns the frames as a tuple; None if the context has entered none.
    #[inline]
    pub fn entered(&self, py: Python<'py>) -> PyResult<Option<&Bound<'py, PyTuple>>> {
        if let Some(frames) = self.0.get() {
            return Ok(frames.as_ref());
        }
        let frames = read(py)?;
        Ok(self.0.get_or_init(|| frames).as_ref())
    }
}
