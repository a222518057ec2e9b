//! Recursion limit for calls without a Python frame, such as a module that is its own hook.
//!
//! CPython 3.12 and 3.13 allow thousands of nested native calls, whatever their use of the stack;
//! calls of hooked modules overflow it earlier. Here they count like Python's own calls.

use std::cell::Cell;

use pyo3::exceptions::PyRecursionError;
use pyo3::ffi;
use pyo3::prelude::*;

thread_local! {
    static DEPTH: Cell<i32> = const { Cell::new(0) };
}

/// Guard of one nested call.
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
