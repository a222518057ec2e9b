//! Typed hooks, as far as the call needs to know them.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::error::{hook_type_error, type_name};
use crate::hooks::hook::PhaseName;

/// The base of the typed hooks: a callback and the phase that its class belongs to.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct TypedHook {
    pub phase: Phase,
    pub callback: Py<PyAny>,
}

#[pymethods]
impl TypedHook {
    #[new]
    #[pyo3(text_signature = "(phase, fn, /)")]
    fn new(py: Python<'_>, phase: PhaseName, r#fn: Py<PyAny>) -> PyResult<Self> {
        let callback = r#fn.bind(py);
        if !callback.is_callable() {
            return Err(hook_type_error(
                py,
                format!(
                    "a typed {} hook wraps a callable, got {}",
                    phase.0,
                    type_name(callback)
                ),
            ));
        }
        Ok(Self {
            phase: phase.0,
            callback: r#fn,
        })
    }

    /// The callback.
    #[getter]
    fn r#fn<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.callback.bind(py)
    }

    /// The phase that hooks of this type are registered for.
    #[getter]
    fn phase(&self) -> &'static str {
        self.phase.name()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let callback = slf.get().callback.bind(slf.py()).repr()?;
        Ok(format!("{}({callback})", type_name(slf)))
    }

    /// Copies and pickles as its class called with the callback.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyAny>,)) {
        let callback = slf.get().callback.bind(slf.py()).clone();
        (slf.get_type(), (callback,))
    }

    // No `__clear__`: the callback never changes, so a cycle through it has another edge to cut
    // (a function's closure, an object's attributes).
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.callback)
    }
}
