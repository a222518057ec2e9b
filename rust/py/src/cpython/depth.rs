//! A limit to recursion without a Python frame, such as a module that is its own hook.
//!
//! CPython 3.12 and 3.13 allow thousands of nested calls of native code, whatever they need of the
//! stack, and calls of hooked modules overflow it before. Here they count like Python's own calls.

use std::cell::Cell;

use pyo3::exceptions::PyRecursionError;
use pyo3::ffi;
use pyo3::prelude::*;

thread_local! {
    static DEPTH: Cell<i32> = const { Cell::new(0) };
}

/// Being inside one more call.
pub struct Depth(());

impl Depth {
    pub fn enter(_: Python<'_>) -> PyResult<Self> {
        let depth = DEPTH.get() + 1;
        // SAFETY: the interpreter is attached.
        if depth > unsafe { ffi::Py_GetRecursionLimit() } {
            return Err(PyRecursionError::new_err(
                "maximum recursion depth exceeded while calling a HookedModule",
            ));
        }
        DEPTH.set(depth);
        Ok(Self(()))
    }
}

impl Drop for Depth {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}
