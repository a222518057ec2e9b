//! Instrumenting modules and giving them back: the change of class, counted.
//!
//! Here and not in Python, which runs the handlers of signals in the middle of its functions:
//! wherever Ctrl-C lands, a module is held or it is not, and who holds it knows.

use std::sync::Arc;

use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::dict::instance_dict;
use crate::dispatcher::Dispatcher;
use crate::error::hook_error;
use crate::handle::HookHandle;
use crate::invoke;
use crate::registry::Registry;
use crate::torch;

/// Modules that are instrumented for one reason, and the hooks that are the reason.
///
/// A context manager that gives them back at exit. Dropping it leaves all as it is.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct Hold(pub Arc<Held>);

/// What a `Hold` holds, until it is given back.
pub struct Held(Mutex<Option<Contents>>);

#[derive(Default)]
struct Contents {
    /// Weak, as scopes know of them; each with whether `instrument` asked for it.
    modules: Vec<(Py<PyWeakrefReference>, bool)>,
    handles: Vec<Py<HookHandle>>,
}

impl Held {
    pub fn given_back(&self) -> bool {
        self.0.lock().is_none()
    }

    /// Removes the hooks and gives the modules back, once, whichever threads ask for it. Whether it
    /// was this call that did so.
    pub fn give_back(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(contents) = self.0.lock().take() else {
            return Ok(false);
        };
        for handle in &contents.handles {
            handle.get().0.remove();
        }
        // All of them, whatever becomes of one.
        let modules = contents.modules.iter();
        let released = modules.filter_map(|(module, asked_for)| {
            let module = module.bind(py).upgrade()?;
            Some(release(&module, *asked_for))
        });
        released.fold(Ok(()), Result::and).map(|()| true)
    }

    /// Adds to what is held; an error where that was given back already.
    fn add(&self, py: Python<'_>, add: impl FnOnce(&mut Contents)) -> PyResult<()> {
        if let Some(contents) = self.0.lock().as_mut() {
            add(contents);
            return Ok(());
        }
        Err(hook_error(
            py,
            "what this was for is over: its hooks were removed".to_owned(),
        ))
    }
}

#[pymethods]
impl Hold {
    #[new]
    #[pyo3(signature = (*_others, **_options))]
    fn new(_others: &Bound<'_, PyTuple>, _options: Option<&Bound<'_, PyDict>>) -> Self {
        Self(Arc::new(Held(Mutex::new(Some(Contents::default())))))
    }

    /// Instruments a module, once more.
    ///
    /// Args:
    ///     module: the module.
    ///     make: gives the class for it, where it is not instrumented.
    ///     asked_for: by `instrument`, and not only for a hook or a capture.
    ///
    /// Raises:
    ///     HookError: that is impossible, or all was given back; the module is as it was.
    #[pyo3(name = "_hold")]
    fn hold(
        &self,
        module: &Bound<'_, PyAny>,
        make: &Bound<'_, PyAny>,
        asked_for: bool,
    ) -> PyResult<()> {
        let reference = PyWeakrefReference::new(module)?.unbind();
        hold(module, make, asked_for)?;
        self.0
            .add(module.py(), |held| {
                held.modules.push((reference, asked_for));
            })
            .inspect_err(|_| drop(release(module, asked_for)))
    }

    /// Calls what registers a hook, which is removed when the modules are given back.
    ///
    /// Raises:
    ///     HookError: they were, and the hook with them.
    #[pyo3(name = "_register", signature = (register, *args, **options))]
    fn register<'py>(
        &self,
        register: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, HookHandle>> {
        let handle = register.call(args, options)?.cast_into::<HookHandle>()?;
        let added = handle.clone().unbind();
        self.0
            .add(handle.py(), |held| held.handles.push(added))
            .inspect_err(|_| {
                handle.get().0.remove();
            })?;
        Ok(handle)
    }

    /// Takes over modules that others have instrumented for a hook, and hooks on them.
    #[pyo3(name = "_take_over")]
    fn take_over(
        &self,
        py: Python<'_>,
        modules: Vec<Bound<'_, PyAny>>,
        handles: Vec<Py<HookHandle>>,
    ) -> PyResult<()> {
        let references = modules
            .iter()
            .map(|module| Ok((PyWeakrefReference::new(module)?.unbind(), false)))
            .collect::<PyResult<Vec<_>>>()?;
        self.0.add(py, |held| {
            held.modules.extend(references);
            held.handles.extend(handles);
        })
    }

    /// Removes the hooks and gives the modules back as often as they are held here, once. Returns
    /// whether it was this call that did so.
    #[pyo3(name = "_give_back")]
    fn give_back(&self, py: Python<'_>) -> PyResult<bool> {
        self.0.give_back(py)
    }

    /// Whether that was done.
    #[getter(_given_back)]
    fn given_back(&self) -> bool {
        self.0.given_back()
    }

    /// For subclasses: what they do first at exit, and whether no exception is on its way.
    #[pyo3(name = "_leaving", signature = (_fine, /))]
    #[expect(clippy::unused_self, reason = "a method of Python's")]
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
        slf.get().0.give_back(py)?;
        left.map(drop)
    }
}

/// Undoes one hold of a module; the last one gives it back as it was and removes its hooks.
fn release(module: &Bound<'_, PyAny>, asked_for: bool) -> PyResult<()> {
    let py = module.py();
    let state = instance_dict(module)?;
    let dispatcher = {
        let _others_wait = one_at_a_time(py);
        let Some(dispatcher) = dispatcher_in(&state)? else {
            return Ok(());
        };
        if dispatcher.get().release(asked_for) > 0 {
            return Ok(());
        }
        if instrumented(module)? {
            set_class(module, torch::plain_class(&module.get_type())?.as_any())?;
        }
        state.del_item(intern!(py, Dispatcher::KEY))?;
        dispatcher
    };
    if !dispatcher.get().shares_hooks() {
        let registry = dispatcher.get().registry(py);
        registry.call_method0(intern!(py, "clear"))?;
    }
    Ok(())
}

/// Undoes the hold that a copy of an instrumented module was made with, once. Returns whether it was
/// this call that did so.
#[pyfunction]
pub fn release_copy(module: &Bound<'_, PyAny>) -> PyResult<bool> {
    match dispatcher_in(&instance_dict(module)?)? {
        Some(dispatcher) if dispatcher.get().take_copy() => {
            release(module, dispatcher.get().asked_for()).map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Gives a module another class: `plain`, or `instrumented`, which is made from it, where the module
/// is instrumented. False where that is so and none was given.
#[pyfunction]
pub fn assign_class(
    module: &Bound<'_, PyAny>,
    plain: &Bound<'_, PyAny>,
    instrumented: Option<&Bound<'_, PyAny>>,
) -> PyResult<bool> {
    let py = module.py();
    let state = instance_dict(module)?;
    let _others_wait = one_at_a_time(py);
    let class = if dispatcher_in(&state)?.is_some() {
        instrumented
    } else {
        Some(plain)
    };
    class.map_or(Ok(false), |class| set_class(module, class).map(|()| true))
}

/// One thread at a time changes classes. Recursive: what is allocated meanwhile may have the garbage
/// collector run a finaliser, which does so too.
fn one_at_a_time(py: Python<'_>) -> ReentrantMutexGuard<'static, ()> {
    static CLASSES: ReentrantMutex<()> = ReentrantMutex::new(());
    loop {
        if let Some(guard) = CLASSES.try_lock() {
            return guard;
        }
        // Taken by threads alone that have the interpreter, and so by none across a fork.
        invoke::detached(py, || drop(CLASSES.lock()));
    }
}

fn hold(module: &Bound<'_, PyAny>, make: &Bound<'_, PyAny>, asked_for: bool) -> PyResult<()> {
    let py = module.py();
    let state = instance_dict(module)?;
    {
        let _others_wait = one_at_a_time(py);
        if let Some(dispatcher) = dispatcher_in(&state)?
            && instrumented(module)?
        {
            dispatcher.get().hold(asked_for);
            return Ok(());
        }
    }
    // Python code, before anything is changed.
    let class = make.call1((module,))?;
    let callee = class.getattr(intern!(py, "_callee"))?.cast_into()?;
    let registry = py.get_type::<Registry>().call0()?.cast_into()?;
    let fresh = Bound::new(py, Dispatcher::new(registry.unbind(), callee.unbind()))?;
    let _others_wait = one_at_a_time(py);
    let dispatcher = dispatcher_in(&state)?.unwrap_or(fresh);
    state.set_item(intern!(py, Dispatcher::KEY), &dispatcher)?;
    if !instrumented(module)?
        && let Err(error) = set_class(module, &class)
    {
        state.del_item(intern!(py, Dispatcher::KEY))?;
        return Err(error);
    }
    dispatcher.get().hold(asked_for);
    Ok(())
}

fn dispatcher_in<'py>(state: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, Dispatcher>>> {
    let found = state.get_item(intern!(state.py(), Dispatcher::KEY))?;
    // Where somebody else has saved the dict it came back as None.
    Ok(found.and_then(|found| found.cast_into().ok()))
}

/// Whether the module's class is one that was made for instrumented modules.
fn instrumented(module: &Bound<'_, PyAny>) -> PyResult<bool> {
    let made_from = intern!(module.py(), "_made_from");
    Ok(module.get_type().getattr_opt(made_from)?.is_some())
}

/// Changes the class itself: `__class__` of an instrumented module is the plain one.
fn set_class(module: &Bound<'_, PyAny>, class: &Bound<'_, PyAny>) -> PyResult<()> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = module.py();
    let own = CLASS.get_or_try_init(py, || {
        let object = py.get_type::<PyAny>();
        let namespace = object.getattr(intern!(py, "__dict__"))?;
        namespace.get_item("__class__").map(Bound::unbind)
    })?;
    let set = own.call_method1(py, intern!(py, "__set__"), (module, class));
    set.map(drop).map_err(|error| {
        if !error.is_instance_of::<PyTypeError>(py) {
            return error;
        }
        let refused = hook_error(
            py,
            format!("its class cannot be changed: {}", error.value(py)),
        );
        refused.set_cause(py, Some(error));
        refused
    })
}
