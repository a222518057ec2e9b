//! The current context: the scopes that it has entered.

use std::cell::OnceCell;
use std::ptr;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

/// A context as it is in a scope, and what tells it from its copies.
pub struct Entered {
    pub scopes: Py<PyTuple>,
    pub token: Py<PyAny>,
}

/// The context variable that holds the entered scopes: a tuple, the outermost first.
pub fn variable(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static VARIABLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    VARIABLE
        .get_or_try_init(py, || {
            let none = PyTuple::empty(py);
            // SAFETY: a name in C's form and a live object; a new reference or null with an
            // exception comes back.
            let variable = unsafe {
                Bound::from_owned_ptr_or_err(
                    py,
                    ffi::PyContextVar_New(c"ferrohook_scopes".as_ptr(), none.as_ptr()),
                )
            };
            variable.map(Bound::unbind)
        })
        .map(|variable| variable.bind(py))
}

/// Puts a scope behind those of this context, or in place of one of them.
pub fn enter(scope: &Bound<'_, PyAny>, instead: Option<&Bound<'_, PyAny>>) -> PyResult<Entered> {
    let py = scope.py();
    let others = active(py)?.into_iter();
    let others = others.filter(|each| instead.is_none_or(|instead| !each.is(instead)));
    let scopes: Vec<_> = others.chain([scope.clone()]).collect();
    let scopes = PyTuple::new(py, scopes)?;
    let token = variable(py)?.call_method1(intern!(py, "set"), (&scopes,))?;
    Ok(Entered {
        scopes: scopes.unbind(),
        token: token.unbind(),
    })
}

/// The scopes of this context.
pub fn active(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let active = variable(py)?.call_method0(intern!(py, "get"))?;
    Ok(active.cast_into()?)
}

/// Makes these the scopes of this context.
pub fn set(scopes: &Bound<'_, PyTuple>) -> PyResult<()> {
    let py = scopes.py();
    variable(py)?
        .call_method1(intern!(py, "set"), (scopes,))
        .map(drop)
}

/// The tuple without one of its objects.
pub fn without<'py>(
    scopes: &Bound<'py, PyTuple>,
    one: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let others = scopes.iter_borrowed().filter(|each| !each.is(one));
    PyTuple::new(scopes.py(), others.collect::<Vec<_>>())
}

/// Whether two tuples have the same objects.
pub fn same(first: &Bound<'_, PyTuple>, second: &Bound<'_, PyTuple>) -> bool {
    let mut pairs = first.iter_borrowed().zip(second.iter_borrowed());
    first.len() == second.len() && pairs.all(|(one, other)| one.is(other))
}

/// Sets the context variable to its default: what is set the interpreter remembers, and what is not
/// it looks for at length in each call.
#[cold]
fn set_to_none(py: Python<'_>, variable: *mut ffi::PyObject) -> PyResult<()> {
    let none = PyTuple::empty(py);
    // SAFETY: a context variable and a live object; a new reference or null with an exception comes
    // back.
    let token =
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContextVar_Set(variable, none.as_ptr())) };
    token.map(drop)
}

/// What the context variable holds here.
fn ask(py: Python<'_>) -> PyResult<Option<Bound<'_, PyTuple>>> {
    let variable = variable(py)?.as_ptr();
    let none = py.None();
    let mut scopes = ptr::null_mut();
    // SAFETY: a context variable, and what to give where it is not set; a new reference comes back,
    // or an exception.
    let scopes = unsafe {
        if ffi::PyContextVar_Get(variable, none.as_ptr(), &raw mut scopes) < 0 {
            return Err(PyErr::fetch(py));
        }
        Bound::from_owned_ptr(py, scopes)
    };
    if scopes.is_none() {
        set_to_none(py, variable)?;
        return Ok(None);
    }
    let scopes = scopes
        .cast_into::<PyTuple>()
        .map_err(|_| PyRuntimeError::new_err("ferrohook_scopes is no tuple of scopes"))?;
    Ok((!scopes.is_empty()).then_some(scopes))
}

/// The scopes of the context that a call is made in, asked for when they are first needed.
#[derive(Default)]
pub struct Scopes<'py>(OnceCell<Option<Bound<'py, PyTuple>>>);

impl<'py> Scopes<'py> {
    /// Those that are given, wherever the call is made.
    pub fn given(scopes: Bound<'py, PyTuple>) -> Self {
        Self(OnceCell::from((!scopes.is_empty()).then_some(scopes)))
    }

    /// The scopes as a tuple, or None where the context has entered none.
    #[inline]
    pub fn entered(&self, py: Python<'py>) -> PyResult<Option<&Bound<'py, PyTuple>>> {
        if let Some(scopes) = self.0.get() {
            return Ok(scopes.as_ref());
        }
        let scopes = ask(py)?;
        Ok(self.0.get_or_init(|| scopes).as_ref())
    }
}
