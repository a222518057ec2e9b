//! Scopes: hooks that fire for the calls of the contexts that entered them, and for no others.

use std::cell::OnceCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use ferrohook_core::{Entry, Inside, Phase, Registry, Snapshot};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use rustc_hash::FxHashMap;

use crate::error::{hook_error, hook_type_error, type_name};
use crate::hook::{Callback, Hook, PhaseName};

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
}

impl ScopedHooks {
    fn new(Scoped(module): &Scoped) -> Self {
        let hooks: Arc<Registry<Hook>> = Arc::default();
        let mut known = module.hooks.lock();
        known.retain(|each| Arc::strong_count(each) > 1 || !each.active().is_empty());
        known.push(Arc::clone(&hooks));
        module.scopes.fetch_add(1, Ordering::Release);
        Self {
            hooks,
            module: Arc::downgrade(module),
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
/// They are kept here and not with the modules: what other contexts registered costs a call nothing.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct ScopeBase(Mutex<Option<Modules>>);

impl ScopeBase {
    /// The hooks for the module with this number, if the scope has any.
    fn hooks(&self, module: u64) -> Option<Arc<Registry<Hook>>> {
        let scope = self.0.lock();
        Some(Arc::clone(&scope.as_ref()?.hooks.get(&module)?.hooks))
    }

    /// The hooks for the module with this number, to register with.
    pub fn hooks_to_change(
        &self,
        py: Python<'_>,
        module: u64,
        phase: Phase,
        scoped: &Scoped,
    ) -> PyResult<Arc<Registry<Hook>>> {
        scoped.0.phases[phase as usize].store(true, Ordering::Release);
        let mut scope = self.0.lock();
        let Some(modules) = scope.as_mut() else {
            drop(scope);
            return Err(closed(py));
        };
        let gone = modules.gone();
        let hooks = modules
            .hooks
            .entry(module)
            .or_insert_with(|| ScopedHooks::new(scoped));
        let hooks = Arc::clone(&hooks.hooks);
        drop(scope);
        drop(gone); // runs Python code
        Ok(hooks)
    }

    /// An error if the scope was closed.
    pub fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.0.lock().is_some() {
            return Ok(());
        }
        Err(closed(py))
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
    pub fn new() -> Self {
        Self(Mutex::new(Some(Modules::default())))
    }

    /// Whether the scope was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.lock().is_none()
    }

    /// Removes the scope's hooks, for good. Returns whether it was this call that did so.
    #[pyo3(name = "_close")]
    fn close(&self) -> bool {
        // Taken under the lock, and removed and dropped after it: that runs Python code.
        let modules = self.0.lock().take();
        for scoped in modules.iter().flat_map(|modules| modules.hooks.values()) {
            scoped.hooks.clear(None);
        }
        modules.is_some()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for scoped in self
            .0
            .lock()
            .iter()
            .flat_map(|modules| modules.hooks.values())
        {
            scoped.hooks.visit(|hook| visit.call(hook.given()))?;
        }
        Ok(())
    }

    fn __clear__(&self) {
        self.close();
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
