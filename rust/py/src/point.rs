//! Hooks of hook points, as far as the call needs to know them.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::{invoke, torch};

/// The base of what hook points register: a callable of the form `hook(tensor, hook=point)`.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct PointHook {
    user_hook: Py<PyAny>,
    /// Whether it is called under the point's own name, and not under others.
    pub under_own_name: bool,
}

#[pymethods]
impl PointHook {
    #[new]
    #[pyo3(signature = (user_hook, is_permanent = None, context_level = None, aliases = None))]
    fn new(
        user_hook: Py<PyAny>,
        is_permanent: Option<&Bound<'_, PyAny>>,
        context_level: Option<&Bound<'_, PyAny>>,
        aliases: Option<&Bound<'_, PyAny>>,
    ) -> Self {
        let _ = (is_permanent, context_level); // those of the subclass
        Self {
            user_hook,
            under_own_name: aliases.is_none(),
        }
    }

    /// What was added.
    #[getter]
    fn user_hook<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.user_hook.bind(py)
    }

    // No `__clear__`: the hook never changes, so a cycle through it has another edge to cut.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.user_hook)
    }
}

impl PointHook {
    /// Calls it for what the point returned; None where the point shows its hooks another layout,
    /// which Python sees to.
    pub fn call<'py>(
        &self,
        point: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        static KEYWORDS: PyOnceLock<Py<PyTuple>> = PyOnceLock::new();
        let py = point.py();
        let conversion = torch::instance_dict(point)?.get_item(intern!(py, "_hook_conversion"))?;
        if conversion.is_some_and(|conversion| !conversion.is_none()) {
            return Ok(None);
        }
        let keywords = KEYWORDS.get_or_try_init(py, || {
            PyTuple::new(py, [intern!(py, "hook")]).map(Bound::unbind)
        })?;
        let user_hook = self.user_hook.bind(py);
        invoke::call_with_keyword(user_hook, output, keywords.bind(py), point).map(Some)
    }
}
