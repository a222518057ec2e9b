//! Hooks of hook points: native wrappers of a Python callable of the form `hook(tensor,
//! hook=point)`.

use std::sync::OnceLock;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::attach::instrumenting::register_each;
use crate::contexts::frame::ScopeArg;
use crate::cpython::dict::instance_dict;
use crate::cpython::invoke;
use crate::cpython::once::Once;
use crate::hooks::callable::refuse_async;
use crate::hooks::handle::HookHandle;
use crate::hooks::native::{Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::hooks::options::{OnError, PhaseName, Priority};
use crate::registry::Audience;

/// Base of the hooks of hook points: a callable of the form `hook(tensor, hook=point)` and the
/// options that it was added with.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct PointHook {
    user_hook: Py<PyAny>,
    is_permanent: bool,
    context_level: Option<Py<PyAny>>,
    aliases: Option<Py<PyAny>>,
    /// Set when it is registered.
    handle: OnceLock<Py<HookHandle>>,
}

#[pymethods]
impl PointHook {
    #[new]
    #[pyo3(signature = (user_hook, is_permanent = false, context_level = None, aliases = None))]
    fn new(
        py: Python<'_>,
        user_hook: Py<PyAny>,
        is_permanent: bool,
        context_level: Option<Py<PyAny>>,
        aliases: Option<Py<PyAny>>,
    ) -> PyResult<(Self, NativeHook)> {
        refuse_async(user_hook.bind(py), "a hook")?;
        let hook = Self {
            user_hook,
            is_permanent,
            context_level,
            aliases,
            handle: OnceLock::new(),
        };
        Ok((hook, NativeHook::of::<Self>()))
    }

    /// The callable that was added.
    #[getter]
    fn user_hook<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.user_hook.bind(py)
    }

    /// True if removing hooks leaves it, unless permanent ones are included.
    #[getter]
    fn is_permanent(&self) -> bool {
        self.is_permanent
    }

    /// Number of open `hooks` contexts around it, its own included; None if it was added outside of
    /// one.
    #[getter]
    fn context_level<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.context_level.as_ref()?.bind(py))
    }

    /// Names that it is called under, in place of the point's own.
    #[getter]
    fn _aliases<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.aliases.as_ref()?.bind(py))
    }

    /// The registry's handle, which removes, disables and describes the hook. Before it is
    /// registered: the handle of a removed hook.
    #[getter]
    fn hook<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, HookHandle>> {
        static NOT_YET: Once<Py<HookHandle>> = Once::new();
        let handle = match self.handle.get() {
            Some(handle) => handle,
            None => NOT_YET.get_or_try_init(py, || {
                Py::new(py, HookHandle::none(py, PhaseName(Phase::Forward))?)
            })?,
        };
        Ok(handle.bind(py))
    }

    /// Sets its handle, once.
    #[pyo3(name = "_registered")]
    pub fn registered(&self, handle: Py<HookHandle>) {
        let _ = self.handle.set(handle);
    }

    // No `__clear__`: the hook is immutable, so a cycle through it has another edge to cut.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.user_hook)?;
        visit.call(&self.context_level)?;
        visit.call(&self.aliases)
    }
}

impl Native for PointHook {
    /// Native for the point's own name; aliases and gradients are handled in Python.
    fn native_in(&self, phase: Phase) -> bool {
        phase == Phase::Forward && self.aliases.is_none()
    }

    fn changes(&self) -> bool {
        true
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        static KEYWORDS: Once<Py<PyTuple>> = Once::new();
        let py = object.py();
        let point = turn.module;
        let conversion = instance_dict(point)?.get_item(intern!(py, "_hook_conversion"))?;
        let result = if conversion.is_some_and(|conversion| !conversion.is_none()) {
            // Another layout: converted in Python.
            invoke::call(object, [point, turn.args.as_any(), turn.value])?
        } else {
            let keywords = KEYWORDS.get_or_try_init(py, || {
                PyTuple::new(py, [intern!(py, "hook")]).map(Bound::unbind)
            })?;
            let user_hook = self.user_hook.bind(py);
            invoke::call_with_keyword(user_hook, turn.value, keywords.bind(py), point)?
        };
        Ok((!result.is_none()).then_some(result))
    }

    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced::plain(object.clone(), false)))
    }
}

/// Registers hooks of hook points, (point, hook) each, for one phase and scope.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         registered.
#[pyfunction]
pub fn register_all(
    hooks: Vec<(Bound<'_, PyAny>, Bound<'_, PointHook>)>,
    phase: PhaseName,
    scope: ScopeArg<'_>,
) -> PyResult<()> {
    let (placement, options) = (Priority(0).place(false), OnError::Raise.into());
    let pairs = hooks.iter();
    let pairs = pairs.map(|(point, hook)| Ok((point.clone(), hook.as_any().clone(), None)));
    let registered = register_each(pairs, phase.0, placement, options, Audience::Scope(&scope));
    for ((_, hook), handle) in hooks.iter().zip(registered) {
        hook.get().registered(handle?);
    }
    Ok(())
}
