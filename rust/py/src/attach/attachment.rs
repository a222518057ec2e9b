//! Attachments: the modules instrumented and the hooks registered for one purpose.
//!
//! Native, since Python runs signal handlers in the middle of its functions: wherever Ctrl-C lands,
//! a module is either instrumented and in the attachment, or not instrumented.

use std::sync::Arc;

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::attach::dispatcher::ModuleRef;
use crate::attach::instrumenting::{
    acquire, has_hooks_elsewhere, module_ref, register_each, registry_of, release,
    release_when_unused,
};
use crate::contexts::frame::ScopeArg;
use crate::contexts::releases::Release;
use crate::error::{hook_error, is_hook_error};
use crate::hooks::handle::HookHandle;
use crate::hooks::options::{HookOptions, OnError, PhaseName, Priority};
use crate::registry::Audience;

/// Modules instrumented and hooks registered for one purpose, released together, once.
///
/// Dropping it releases nothing.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct Attachment(Mutex<Option<Contents>>);

/// Contents of an attachment until its release.
#[derive(Default)]
struct Contents {
    modules: Vec<AttachedModule>,
    handles: Vec<Py<HookHandle>>,
    /// Hooks that serve these hooks, and go with them.
    guards: Vec<Py<HookHandle>>,
}

struct AttachedModule {
    /// Weak: frames own attachments and may outlive models.
    module: Arc<ModuleRef>,
    /// True if instrumented by a call of `instrument`, not just for a hook or a capture.
    explicit: bool,
}

impl Default for Attachment {
    fn default() -> Self {
        Self(Mutex::new(Some(Contents::default())))
    }
}

impl Attachment {
    fn add(&self, py: Python<'_>, add: impl FnOnce(&mut Contents)) -> PyResult<()> {
        if let Some(contents) = self.0.lock().as_mut() {
            add(contents);
            return Ok(());
        }
        Err(hook_error(
            py,
            "cannot add hooks: their owner was closed, and its hooks were removed",
        ))
    }

    fn instrument_one(
        &self,
        module: &Bound<'_, PyAny>,
        make_class: &Bound<'_, PyAny>,
        explicit: bool,
    ) -> PyResult<()> {
        let attached = AttachedModule {
            module: acquire(module, make_class, explicit)?,
            explicit,
        };
        self.add(module.py(), |contents| contents.modules.push(attached))
            .inspect_err(|_| drop(release(module, explicit)))
    }
}

impl Release for Py<Attachment> {
    fn release(&self, py: Python<'_>) -> PyResult<bool> {
        self.get().release(py)
    }

    fn released(&self) -> bool {
        self.get().released()
    }

    fn unused(&self) -> bool {
        let contents = self.get().0.lock();
        let mut handles = contents.iter().flat_map(|contents| &contents.handles);
        handles.all(|handle| handle.get().hook().removed())
    }
}

#[pymethods]
impl Attachment {
    #[new]
    fn py_new() -> Self {
        Self::default()
    }

    /// Instruments modules; each counts one reason more.
    ///
    /// Args:
    ///     modules: the modules. Those whose hooks are stored elsewhere (wrappers) are skipped.
    ///     make_class: makes the class of a module that is not instrumented yet; for one that
    ///         keeps its own, a key for torch's pre-hooks and the hook.
    ///     explicit: True for a call of `instrument`, False for a hook or a capture.
    ///
    /// Returns:
    ///     The modules that could not be instrumented: (index, `HookError`) each.
    ///
    /// Raises:
    ///     HookError: the attachment was released.
    fn instrument(
        &self,
        modules: Vec<Bound<'_, PyAny>>,
        make_class: &Bound<'_, PyAny>,
        explicit: bool,
    ) -> PyResult<Vec<(usize, PyErr)>> {
        let mut refused = Vec::new();
        for (place, module) in modules.iter().enumerate() {
            if has_hooks_elsewhere(module)? {
                continue;
            }
            match self.instrument_one(module, make_class, explicit) {
                Err(error) if is_hook_error(module.py(), &error) && !self.released() => {
                    refused.push((place, error));
                }
                done => done?,
            }
        }
        Ok(refused)
    }

    /// Registers one hook with each of these modules, which are instrumented or wrapped.
    ///
    /// The options are the same as in `ferrohook.register`; `names` are the names of the modules,
    /// `entry` is the number of the hook's entry in a plan.
    ///
    /// Returns:
    ///     The handles, in the order of the modules.
    ///
    /// Raises:
    ///     HookTypeError, ValueError: the hook or an option is refused.
    ///     HookError: a module is not instrumented, or the scope or the attachment is closed; the
    ///         hooks before it are registered, and go with the attachment.
    #[pyo3(
        signature = (modules, phase, hook, *, prepend = false, with_kwargs = false, always_call = false, priority = Priority(0), on_error = OnError::Raise, scope = None, names = None, entry = None),
        text_signature = "($self, modules, phase, hook, *, prepend=False, with_kwargs=False, always_call=False, priority=0, on_error='raise', scope=None, names=None, entry=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the options, by keyword")]
    fn register(
        &self,
        py: Python<'_>,
        modules: Vec<Bound<'_, PyAny>>,
        phase: PhaseName,
        hook: &Bound<'_, PyAny>,
        prepend: bool,
        with_kwargs: bool,
        always_call: bool,
        priority: Priority,
        on_error: OnError,
        scope: Option<ScopeArg<'_>>,
        names: Option<Vec<String>>,
        entry: Option<u32>,
    ) -> PyResult<Vec<Py<HookHandle>>> {
        let options = HookOptions {
            with_kwargs,
            always_call,
            on_error,
            entry,
        };
        let placement = priority.place(prepend);
        let mut names = names.unwrap_or_default().into_iter();
        let hooks = modules.into_iter();
        let hooks = hooks.map(|module| Ok((module, hook.clone(), names.next())));
        let audience = Audience::of_caller(py, scope.as_ref())?;
        let registered = register_each(hooks, phase.0, placement, options, audience);
        let add = |handle: PyResult<Py<HookHandle>>| {
            let handle = handle?;
            self.add(py, |contents| contents.handles.push(handle.clone_ref(py)))
                .inspect_err(|_| {
                    handle.get().hook().remove();
                })?;
            Ok(handle)
        };
        registered.map(add).collect()
    }

    /// Registers a hook that serves the others of the attachment: one that starts each call of an
    /// instrumented module, ahead of all hooks, or one that ends it, after all hooks.
    ///
    /// Raises:
    ///     HookError: the module is not instrumented, or the scope or the attachment is closed.
    #[pyo3(signature = (module, phase, hook, scope = None))]
    fn guard(
        &self,
        py: Python<'_>,
        module: Bound<'_, PyAny>,
        phase: PhaseName,
        hook: Bound<'_, PyAny>,
        scope: Option<ScopeArg<'_>>,
    ) -> PyResult<Py<HookHandle>> {
        let starts = phase.0 == Phase::ForwardPre;
        let options = HookOptions {
            always_call: !starts,
            ..OnError::Raise.into()
        };
        let priority = Priority(if starts { i64::MAX } else { i64::MIN });
        let audience = Audience::of_caller(py, scope.as_ref())?;
        let registry = registry_of(&module)?;
        let placement = priority.place(starts);
        let handle = registry
            .get()
            .register(phase.0, &hook, placement, options, audience, None)?;
        let handle = Py::new(py, handle)?;
        self.add(py, |contents| contents.guards.push(handle.clone_ref(py)))
            .inspect_err(|_| {
                handle.get().hook().remove();
            })?;
        Ok(handle)
    }

    /// Takes over modules that were instrumented for a hook, and the hooks on them.
    ///
    /// Raises:
    ///     HookError: the attachment was released.
    fn adopt(
        &self,
        py: Python<'_>,
        modules: Vec<Bound<'_, PyAny>>,
        handles: Vec<Py<HookHandle>>,
    ) -> PyResult<()> {
        let mut attached = Vec::new();
        for module in &modules {
            if !has_hooks_elsewhere(module)?
                && let Some(module) = module_ref(module)?
            {
                attached.push(AttachedModule {
                    module,
                    explicit: false,
                });
            }
        }
        self.add(py, |contents| {
            contents.modules.extend(attached);
            contents.handles.extend(handles);
        })
    }

    /// Registers the attachment to be released when a scope closes.
    ///
    /// Raises:
    ///     HookError: the scope is closed; the attachment was released.
    fn release_with(slf: Py<Self>, py: Python<'_>, scope: ScopeArg<'_>) -> PyResult<()> {
        scope.0.get().release_at_end(py, Box::new(slf))
    }

    /// Registers the attachment to be released by `release_unused` of one of these modules, which have
    /// its hooks.
    fn release_when_unused(slf: &Bound<'_, Self>, modules: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let mut modules = modules.iter();
        modules.try_for_each(|module| {
            let attachment = slf.clone().unbind();
            release_when_unused(module, Box::new(attachment))
        })
    }

    /// Removes the hooks and restores the modules, once, even if several threads call it. Returns
    /// True for the call that did so.
    pub fn release(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(contents) = self.0.lock().take() else {
            return Ok(false);
        };
        for handle in contents.handles.iter().chain(&contents.guards) {
            handle.get().hook().remove();
        }
        let modules = contents.modules.iter().map(|attached| {
            let module = attached.module.upgrade(py);
            module.map_or(Ok(()), |module| release(&module, attached.explicit))
        });
        // Releases all, even if one fails.
        modules.fold(Ok(()), Result::and).map(|()| true)
    }

    /// True once it was released.
    #[getter]
    pub fn released(&self) -> bool {
        self.0.lock().is_none()
    }
}

/// Base of context managers that own an attachment and release it at exit.
// Native: in Python, Ctrl-C might land between the start of `__exit__` and the release.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct AttachmentContext(Py<Attachment>);

#[pymethods]
impl AttachmentContext {
    #[new]
    #[pyo3(signature = (*_others, **_options))]
    fn new(
        py: Python<'_>,
        _others: &Bound<'_, PyTuple>,
        _options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        Ok(Self(Py::new(py, Attachment::default())?))
    }

    /// The attachment that is released at exit.
    #[getter]
    fn attachment<'py>(&self, py: Python<'py>) -> &Bound<'py, Attachment> {
        self.0.bind(py)
    }

    /// Runs first at exit, with True if no exception is being raised; for subclasses.
    #[pyo3(name = "_leaving", signature = (_fine, /))]
    #[expect(clippy::unused_self, reason = "a method for Python subclasses")]
    fn leaving(&self, _fine: bool) {}

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        let py = slf.py();
        let left = slf.call_method1(intern!(py, "_leaving"), (error.is_none(),));
        slf.get().0.get().release(py)?;
        left.map(drop)
    }
}
