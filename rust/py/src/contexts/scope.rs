//! Scopes: hooks that fire for the calls of the contexts that entered them, and for no others.

use std::cell::OnceCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use ferrohook_core::{Entry, Inside, Phase, Registry, Snapshot, Watch};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use rustc_hash::FxHashMap;

use crate::error::{hook_error, hook_type_error, type_name};
use crate::hold::{Held, Hold};
use crate::hooks::hook::{Callback, Hook, PhaseName};

/// What a module knows of the scopes that have hooks for it.
#[derive(Default)]
pub struct Scoped(Arc<Known>);

#[derive(Default)]
struct Known {
    /// How many scopes have hooks, and for which phases any ever did: the other calls ask for no
    /// context.
    scopes: AtomicUsize,
    phases: [AtomicBool; Phase::ALL.len()],
    /// Their hooks; those of closed scopes for as long as a thread is inside one.
    hooks: Mutex<Vec<Arc<Registry<Hook>>>>,
}

impl Scoped {
    #[inline]
    pub fn any(&self, phase: Phase) -> bool {
        // Acquire pairs with the release of whoever registers.
        self.0.scopes.load(Ordering::Acquire) != 0
            && self.0.phases[phase as usize].load(Ordering::Acquire)
    }

    /// The hooks of all scopes, those included that were closed while a thread was inside.
    pub fn hooks(&self) -> Vec<Arc<Registry<Hook>>> {
        self.0.hooks.lock().clone()
    }
}

/// One scope's hooks for one module.
struct ScopedHooks {
    hooks: Arc<Registry<Hook>>,
    /// Weak: gone with the module.
    module: Weak<Known>,
    _watch: Watch<Hook>,
}

impl ScopedHooks {
    fn new(Scoped(module): &Scoped, others: &Registry<Hook>) -> Self {
        let hooks: Arc<Registry<Hook>> = Arc::default();
        let mut known = module.hooks.lock();
        known.retain(|each| Arc::strong_count(each) > 1 || !each.active().is_empty());
        known.push(Arc::clone(&hooks));
        module.scopes.fetch_add(1, Ordering::Release);
        Self {
            hooks,
            module: Arc::downgrade(module),
            _watch: others.watch(),
        }
    }
}

impl Drop for ScopedHooks {
    fn drop(&mut self) {
        let Some(module) = self.module.upgrade() else {
            return;
        };
        module.scopes.fetch_sub(1, Ordering::Release);
        if self.hooks.active().is_empty() {
            let mut known = module.hooks.lock();
            known.retain(|each| !Arc::ptr_eq(each, &self.hooks));
        }
    }
}

/// A scope's hooks, by the numbers of the modules.
#[derive(Default)]
struct Modules {
    hooks: FxHashMap<u64, ScopedHooks>,
    /// How many there may be before those of modules that are gone are looked for.
    most: usize,
}

impl Modules {
    /// Those of modules that are gone, where it is time to look for them.
    fn gone(&mut self) -> Vec<ScopedHooks> {
        if self.hooks.len() < self.most {
            return Vec::new();
        }
        let gone = self
            .hooks
            .extract_if(|_, scoped| scoped.module.strong_count() == 0)
            .map(|(_, scoped)| scoped)
            .collect();
        self.most = FEW.max(2 * self.hooks.len());
        gone
    }
}

/// Up to this many modules a scope does not look for those that are gone.
const FEW: usize = 32;

/// The hooks of a scope, until it is closed.
///
/// They are kept here and not with the modules: of what other contexts registered a call only asks
/// whether there is any.
///
/// Entering and leaving is done here: in Python, Ctrl-C might land in the middle.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
#[derive(Default)]
pub struct ScopeBase {
    /// None when it is closed.
    modules: Mutex<Option<Modules>>,
    /// Whether it was entered, if only for a moment.
    once: AtomicBool,
    entered: Mutex<Option<Entered>>,
    /// What is given back when it is closed.
    held: Mutex<Vec<Arc<Held>>>,
}

/// A context as it is in a scope, and what tells it from its copies.
pub struct Entered {
    scopes: Py<PyTuple>,
    pub token: Py<PyAny>,
}

impl ScopeBase {
    pub fn new() -> Self {
        Self {
            modules: Mutex::new(Some(Modules::default())),
            ..Self::default()
        }
    }

    fn closed(&self) -> bool {
        self.modules.lock().is_none()
    }

    /// Removes the hooks. Returns whether it was this call that did so.
    fn remove_hooks(&self) -> bool {
        // Taken under the lock, and removed and dropped after it: that runs Python code.
        let modules = self.modules.lock().take();
        for scoped in modules.iter().flat_map(|modules| modules.hooks.values()) {
            scoped.hooks.clear(None);
        }
        modules.is_some()
    }

    fn leave(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let not_entered = || {
            let message = "this scope is not entered, or was left before";
            hook_error(py, message.to_owned())
        };
        if this.closed() {
            return Err(not_entered());
        }
        let token = this
            .entered
            .lock()
            .as_ref()
            .map(|it| it.token.clone_ref(py));
        let token = token.ok_or_else(not_entered)?;
        let active = active(py)?;
        // Contexts are copied, scopes and all: only the token tells which one it was.
        let variable = variable(py)?;
        let reset = variable.call_method1(intern!(py, "reset"), (token,));
        reset.map_err(|error| {
            if !error.is_instance_of::<PyValueError>(py) {
                return error;
            }
            let elsewhere = hook_error(
                py,
                "a scope is left where it was entered, in the same thread and task: it is still \
                 entered there"
                    .to_owned(),
            );
            elsewhere.set_cause(py, Some(error));
            elsewhere
        })?;
        let others = active.iter_borrowed().filter(|each| !each.is(slf));
        let others = PyTuple::new(py, others.collect::<Vec<_>>())?;
        // Left out of order, this one or one inside it?
        if !same(&self::active(py)?, &others) {
            variable.call_method1(intern!(py, "set"), (others,))?;
        }
        this.close(py)?;
        if active
            .iter_borrowed()
            .last()
            .is_none_or(|last| !last.is(slf))
        {
            return Err(hook_error(
                py,
                "a scope is left after the scopes that were entered inside it: it was left all \
                 the same, and they were not"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// The hooks for the module with this number, if the scope has any.
    fn hooks(&self, module: u64) -> Option<Arc<Registry<Hook>>> {
        let scope = self.modules.lock();
        Some(Arc::clone(&scope.as_ref()?.hooks.get(&module)?.hooks))
    }

    /// The hooks for the module with this number, to register with; `others` fire in every context.
    pub fn hooks_to_change(
        &self,
        py: Python<'_>,
        module: u64,
        phase: Phase,
        scoped: &Scoped,
        others: &Registry<Hook>,
    ) -> PyResult<Arc<Registry<Hook>>> {
        scoped.0.phases[phase as usize].store(true, Ordering::Release);
        let mut scope = self.modules.lock();
        let Some(modules) = scope.as_mut() else {
            drop(scope);
            return Err(closed(py));
        };
        let gone = modules.gone();
        let hooks = modules
            .hooks
            .entry(module)
            .or_insert_with(|| ScopedHooks::new(scoped, others));
        let hooks = Arc::clone(&hooks.hooks);
        drop(scope);
        drop(gone); // runs Python code
        Ok(hooks)
    }

    /// An error if the scope was closed.
    pub fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.closed() {
            return Err(closed(py));
        }
        Ok(())
    }
}

fn closed(py: Python<'_>) -> PyErr {
    hook_error(
        py,
        "this scope was left, and its hooks with it: open another by scope()".to_owned(),
    )
}

#[pymethods]
impl ScopeBase {
    #[new]
    #[pyo3(signature = (*_others, **_options))]
    fn py_new(_others: &Bound<'_, PyTuple>, _options: Option<&Bound<'_, PyDict>>) -> Self {
        Self::new()
    }

    /// Whether the scope was closed.
    #[getter(closed)]
    fn py_closed(&self) -> bool {
        self.closed()
    }

    /// The scopes of the context that entered it, this one the last; None where none did, or left.
    #[getter(_entered)]
    fn entered<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyTuple>> {
        let entered = self.entered.lock();
        Some(entered.as_ref()?.scopes.bind(py).clone())
    }

    /// Has what is held given back when the scope is closed.
    ///
    /// Raises:
    ///     HookError: it is closed.
    #[pyo3(name = "_hold")]
    fn hold(&self, py: Python<'_>, more: &Hold) -> PyResult<()> {
        {
            let mut held = self.held.lock();
            // Those that were given back before are forgotten when the list is full.
            if held.len() == held.capacity() {
                held.retain(|each| !each.given_back());
            }
            held.push(Arc::clone(&more.0));
        }
        self.check_open(py)
            .inspect_err(|_| drop(more.0.give_back(py)))
    }

    /// For subclasses: what they do first when the scope is entered, and give to `with`.
    #[pyo3(name = "_begin")]
    fn begin(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// For subclasses: what they do when it was left, and whether no exception is on its way.
    #[pyo3(name = "_left", signature = (_fine, /))]
    #[expect(clippy::unused_self, reason = "a method of Python's")]
    fn left(&self, _fine: bool) {}

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        if this.closed() || this.once.swap(true, Ordering::Relaxed) {
            let message = slf.getattr(intern!(py, "_ONCE"))?.extract()?;
            return Err(hook_error(py, message));
        }
        let enter = || {
            let given = slf.call_method0(intern!(py, "_begin"))?;
            *this.entered.lock() = Some(enter(slf.as_any(), None)?);
            Ok(given)
        };
        enter().inspect_err(|_| drop(this.close(py)))
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        Self::leave(slf)?;
        let py = slf.py();
        slf.call_method1(intern!(py, "_left"), (error.is_none(),))?;
        Ok(())
    }

    /// Removes the scope's hooks, for good, and gives back what was held for them. Returns whether
    /// it was this call that did so.
    #[pyo3(name = "_close")]
    fn close(&self, py: Python<'_>) -> PyResult<bool> {
        let closed = self.remove_hooks();
        let _entered = self.entered.lock().take();
        let held = std::mem::take(&mut *self.held.lock());
        // All of it, whatever becomes of one.
        let given_back = held.iter().map(|each| each.give_back(py).map(drop));
        given_back.fold(Ok(()), Result::and).map(|()| closed)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for scoped in self
            .modules
            .lock()
            .iter()
            .flat_map(|modules| modules.hooks.values())
        {
            scoped.hooks.visit(|hook| visit.call(hook.given()))?;
        }
        if let Some(entered) = &*self.entered.lock() {
            visit.call(&entered.scopes)?;
            visit.call(&entered.token)?;
        }
        Ok(())
    }

    fn __clear__(&self) {
        self.remove_hooks();
        let _entered = self.entered.lock().take();
    }
}

/// What `scope=` takes.
pub struct ScopeArg<'py>(pub Bound<'py, ScopeBase>);

impl<'py> FromPyObject<'_, 'py> for ScopeArg<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object
            .cast::<ScopeBase>()
            .map(|scope| Self((*scope).clone()))
            .map_err(|_| {
                hook_type_error(
                    object.py(),
                    format!("scope is what scope() returned, got {}", type_name(&object)),
                )
            })
    }
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
fn active(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let active = variable(py)?.call_method0(intern!(py, "get"))?;
    Ok(active.cast_into()?)
}

/// Whether two tuples have the same objects.
fn same(first: &Bound<'_, PyTuple>, second: &Bound<'_, PyTuple>) -> bool {
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

/// What `scopes` have for the module with this number.
pub fn hooks(
    scopes: &Bound<'_, PyTuple>,
    module: u64,
) -> impl Iterator<Item = Arc<Registry<Hook>>> {
    scopes
        .iter_borrowed()
        .filter_map(move |scope| scope.cast::<ScopeBase>().ok()?.get().hooks(module))
}

/// Records what a compiled region lets pass: by the recorder that stands at `position` among those
/// that fire for the module with this number in this context.
#[pyfunction]
pub fn record(
    py: Python<'_>,
    module: u64,
    phase: PhaseName,
    position: usize,
    value: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let scopes = Scopes::default();
    let Some(scopes) = scopes.entered(py)? else {
        return Ok(());
    };
    let snapshots: Vec<_> = hooks(scopes, module)
        .map(|hooks| hooks.snapshot(phase.0))
        .collect();
    let merged = Snapshot::merged(&snapshots);
    let recorder = |entry| match Entry::<Hook>::hook(entry).callback(py) {
        Callback::Recorder(recorder) if entry.enabled() && !entry.removed() => {
            Some((entry, recorder))
        }
        _ => None,
    };
    if let Some((entry, recorder)) = merged.iter().filter_map(recorder).nth(position)
        && let Some(_invocation) = entry.enter(&Inside::here())
    {
        return recorder.get().record_picked(value);
    }
    Ok(())
}
