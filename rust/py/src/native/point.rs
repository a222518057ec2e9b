//! Hooks of hook points, as far as the call needs to know them.

use std::sync::OnceLock;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::cpython::invoke;
use crate::dict::instance_dict;
use crate::hooks::handle::HookHandle;
use crate::hooks::hook::PhaseName;

/// The base of what hook points register: a callable of the form `hook(tensor, hook=point)`, and how
/// it was added.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct PointHook {
    user_hook: Py<PyAny>,
    is_permanent: bool,
    context_level: Option<Py<PyAny>>,
    aliases: Option<Py<PyAny>>,
    /// Once it is registered.
    handle: OnceLock<Py<HookHandle>>,
}

#[pymethods]
impl PointHook {
    #[new]
    #[pyo3(signature = (user_hook, is_permanent = false, context_level = None, aliases = None))]
    fn new(
        user_hook: Py<PyAny>,
        is_permanent: bool,
        context_level: Option<Py<PyAny>>,
        aliases: Option<Py<PyAny>>,
    ) -> Self {
        Self {
            user_hook,
            is_permanent,
            context_level,
            aliases,
            handle: OnceLock::new(),
        }
    }

    /// What was added.
    #[getter]
    fn user_hook<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.user_hook.bind(py)
    }

    /// Whether it stays when hooks are removed, unless permanent ones are asked for.
    #[getter]
    fn is_permanent(&self) -> bool {
        self.is_permanent
    }

    /// How many `hooks` contexts were open around it, its own included; None for what was added
    /// without.
    #[getter]
    fn context_level<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.context_level.as_ref()?.bind(py))
    }

    /// The names that it is called under, in place of the point's own.
    #[getter]
    fn _aliases<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.aliases.as_ref()?.bind(py))
    }

    /// The registry's handle: removes, disables and describes the hook. A removed one until there
    /// is one.
    #[getter]
    fn hook<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, HookHandle>> {
        static NOT_YET: PyOnceLock<Py<HookHandle>> = PyOnceLock::new();
        let handle = match self.handle.get() {
            Some(handle) => handle,
            None => NOT_YET.get_or_try_init(py, || {
                Py::new(py, HookHandle::none(py, PhaseName(Phase::Forward))?)
            })?,
        };
        Ok(handle.bind(py))
    }

    /// Tells it its handle, once.
    #[pyo3(name = "_registered")]
    pub fn registered(&self, handle: Py<HookHandle>) {
        let _ = self.handle.set(handle);
    }

    // No `__clear__`: the hook never changes, so a cycle through it has another edge to cut.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.user_hook)?;
        visit.call(&self.context_level)?;
        visit.call(&self.aliases)
    }
}

impl PointHook {
    /// Whether it is called under the point's own name, and not under others.
    pub fn under_own_name(&self) -> bool {
        self.aliases.is_none()
    }

    /// Calls it for what the point returned; None where the point shows its hooks another layout,
    /// which Python sees to.
    pub fn call<'py>(
        &self,
        point: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        static KEYWORDS: PyOnceLock<Py<PyTuple>> = PyOnceLock::new();
        let py = point.py();
        let conversion = instance_dict(point)?.get_item(intern!(py, "_hook_conversion"))?;
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
