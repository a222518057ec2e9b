//! Instrumenting and restoring modules: the change of class, reference-counted.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrohook_core::{Phase, Placement};
use parking_lot::{ArcReentrantMutexGuard, Mutex, RawMutex, RawThreadId, ReentrantMutex};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyTuple, PyType, PyWeakrefReference};

use crate::attach::dispatcher::{Dispatcher, KeptCall, ModuleRef};
use crate::attach::wrapper::HookedBase;
use crate::contexts::releases::Release;
use crate::cpython::dict::instance_dict;
use crate::cpython::invoke;
use crate::cpython::once::Once;
use crate::error::{caused, hook_error, type_name};
use crate::hooks::handle::HookHandle;
use crate::hooks::options::HookOptions;
use crate::registry::{Audience, Registry};
use crate::torch::cache::CallCache;

/// Undoes one `acquire` of a module; the last one restores its class and removes its hooks.
pub fn release(module: &Bound<'_, PyAny>, explicit: bool) -> PyResult<()> {
    let py = module.py();
    let state = instance_dict(module)?;
    let (dispatcher, restored) = {
        let _others_wait = one_at_a_time(module);
        let Some(dispatcher) = dispatcher_in(module, &state)? else {
            return Ok(());
        };
        if dispatcher.get().release(explicit) > 0 {
            return Ok(());
        }
        (dispatcher, restore_class(module, &state)?)
    };
    if !dispatcher.get().shares_hooks {
        dispatcher.get().registry(py).get().clear(None);
    }
    restored.and(dispatcher.get().tell_restored(py))
}

/// Gives an instrumented module its plain class back and takes its dispatcher out, for callers that
/// hold the lock. The inner result says whether the class could be changed.
fn restore_class(module: &Bound<'_, PyAny>, state: &Bound<'_, PyDict>) -> PyResult<PyResult<()>> {
    let py = module.py();
    let restored = instrumented_from(module)?.map_or(Ok(()), |plain| {
        // Once more after Ctrl-C in an audit hook.
        set_class(module, &plain).or_else(|error| set_class(module, &plain).and(Err(error)))
    });
    if kept_call_in(state)?.is_some() {
        state.del_item(intern!(py, KeptCall::KEY))?;
    }
    let guard =
        dispatcher_in(module, state)?.and_then(|dispatcher| dispatcher.get().guard.lock().take());
    if let Some(id) = guard {
        let hooks = pre_hooks(state)?;
        // False: another library removed all hooks.
        if hooks.contains(&id)? {
            hooks.del_item(id)?;
        }
    }
    state.del_item(intern!(py, Dispatcher::KEY))?;
    Ok(restored)
}

/// Takes the dispatcher off an instrumented module, which is plain until `put_on`; None for a plain
/// module. The hooks stay registered.
#[pyfunction]
pub fn take_off<'py>(module: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, Dispatcher>>> {
    let state = instance_dict(module)?;
    let _others_wait = one_at_a_time(module);
    let dispatcher = dispatcher_in(module, &state)?;
    if dispatcher.is_some() {
        restore_class(module, &state)??;
    }
    Ok(dispatcher)
}

/// Instruments a plain module with the hooks and for the attachments of a dispatcher that was taken
/// off this module or off the one that it replaces.
#[pyfunction]
pub fn put_on(
    module: &Bound<'_, PyAny>,
    dispatcher: &Bound<'_, Dispatcher>,
    make_class: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = module.py();
    let state = instance_dict(module)?;
    let made = MadeClass::new(module, make_class)?;
    let successor = dispatcher
        .get()
        .succeeded(py, made.class_cache.clone_ref(py));
    let successor = Bound::new(py, successor)?;
    let reference = PyWeakrefReference::new(module)?.unbind();
    own_class(py)?;
    let change = || {
        let _others_wait = one_at_a_time(module);
        made.install(module, &state, &successor)?;
        successor.get().refer(reference);
        Ok(())
    };
    change().map_err(|error| refused(py, error))
}

/// Undoes, once, the `acquire` that a copy of an instrumented module inherited. Returns True for
/// the call that did so.
#[pyfunction]
pub fn release_copy(module: &Bound<'_, PyAny>) -> PyResult<bool> {
    match dispatcher_in(module, &instance_dict(module)?)? {
        Some(dispatcher) if dispatcher.get().take_copy() => {
            release(module, dispatcher.get().explicit()).map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Assigns a module the class `plain` or, if the module is instrumented, `instrumented`, which is
/// made from it. Returns False if the module is instrumented and `instrumented` is None.
#[pyfunction]
pub fn assign_class(
    module: &Bound<'_, PyAny>,
    plain: &Bound<'_, PyAny>,
    instrumented: Option<&Bound<'_, PyAny>>,
) -> PyResult<bool> {
    let py = module.py();
    let state = instance_dict(module)?;
    own_class(py)?;
    let set = {
        let _others_wait = one_at_a_time(module);
        let class = if dispatcher_in(module, &state)?.is_some() {
            instrumented
        } else {
            Some(plain)
        };
        class.map_or(Ok(false), |class| set_class(module, class).map(|()| true))
    };
    set.map_err(|error| refused(py, error))
}

/// Locks of the modules whose class changes now, by address.
static LOCKS: Mutex<BTreeMap<usize, Arc<ReentrantMutex<()>>>> = Mutex::new(BTreeMap::new());

/// Guard of the lock for changes of one module's class.
struct OneAtATime {
    module: usize,
    lock: ArcReentrantMutexGuard<RawMutex, RawThreadId, ()>,
}

impl Drop for OneAtATime {
    fn drop(&mut self) {
        let mut locks = LOCKS.lock();
        // The map's and the guard's: no other thread waits, and no outer frame holds it.
        if Arc::strong_count(ArcReentrantMutexGuard::remutex(&self.lock)) == 2 {
            locks.remove(&self.module);
        }
    }
}

/// Locks changes of a module's class. Nothing allocates objects that the garbage collector tracks
/// meanwhile, so no finaliser runs under the lock, but in one kind of Python code: audit hooks, which
/// CPython calls for each change (filelock registers one). A finaliser may wait there for a thread
/// that changes another module's class. Recursive for finalisers and signal handlers that change
/// this one's.
fn one_at_a_time(module: &Bound<'_, PyAny>) -> OneAtATime {
    let address = module.as_ptr() as usize;
    let lock = Arc::clone(LOCKS.lock().entry(address).or_default());
    loop {
        if let Some(lock) = lock.try_lock_arc() {
            return OneAtATime {
                module: address,
                lock,
            };
        }
        // Audit hooks aside, locked only with the interpreter attached: by no thread across a fork.
        invoke::detached(module.py(), || drop(lock.lock()));
    }
}

/// Instruments a module; it counts one reason more. `make_class` makes the class of one that is not
/// instrumented yet, or returns the id of a hook of torch for one that keeps its own.
pub fn acquire(
    module: &Bound<'_, PyAny>,
    make_class: &Bound<'_, PyAny>,
    explicit: bool,
) -> PyResult<Arc<ModuleRef>> {
    let py = module.py();
    let state = instance_dict(module)?;
    let reference = PyWeakrefReference::new(module)?.unbind();
    let count = |dispatcher: &Dispatcher| {
        dispatcher.acquire(explicit);
        dispatcher.refer(reference.clone_ref(py))
    };
    // A replica of DataParallel has the original's, which refers to the original.
    let inherited = |it: &Bound<'_, Dispatcher>| !it.get().is_of(module, true);
    let own = dispatcher_in(module, &state)?
        .filter(inherited)
        .map(|original| Bound::new(py, original.get().__copy__(py)))
        .transpose()?;
    {
        let _others_wait = one_at_a_time(module);
        if let Some(mut dispatcher) = dispatcher_in(module, &state)?
            && is_instrumented(module, &state)?
        {
            if let Some(own) = own.filter(|_| inherited(&dispatcher)) {
                state.set_item(intern!(py, Dispatcher::KEY), &own)?;
                dispatcher = own;
            }
            return Ok(count(dispatcher.get()));
        }
    }
    // Python code runs here, before any change.
    let made = MadeClass::new(module, make_class)?;
    let registry = Py::new(py, Registry::empty())?;
    let fresh = Bound::new(
        py,
        Dispatcher::new(registry, made.class_cache.clone_ref(py)),
    )?;
    own_class(py)?;
    let change = || {
        let _others_wait = one_at_a_time(module);
        let dispatcher = dispatcher_in(module, &state)?;
        let dispatcher = dispatcher.as_ref().unwrap_or(&fresh);
        made.install(module, &state, dispatcher)?;
        Ok(count(dispatcher.get()))
    };
    change().map_err(|error| refused(py, error))
}

/// Class for a module that becomes instrumented; its call instead if the module keeps its class.
struct MadeClass<'py> {
    class: Bound<'py, PyAny>,
    kept_call: Option<Bound<'py, KeptCall>>,
    class_cache: Py<CallCache>,
}

impl<'py> MadeClass<'py> {
    /// Calls `make_class(module)`, see [`acquire`].
    fn new(module: &Bound<'py, PyAny>, make_class: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = module.py();
        let class = make_class.call1((module,))?;
        let kept_call = if class.is_instance_of::<PyInt>() {
            Some(Bound::new(py, KeptCall::new(module)?)?)
        } else {
            None
        };
        let class_cache = match kept_call {
            Some(_) => Bound::new(py, CallCache::default())?,
            None => class.getattr(intern!(py, "_call_cache"))?.cast_into()?,
        };
        Ok(Self {
            class,
            kept_call,
            class_cache: class_cache.unbind(),
        })
    }

    /// Makes a dispatcher run the calls of a module, for callers that hold the lock.
    fn install(
        &self,
        module: &Bound<'py, PyAny>,
        state: &Bound<'py, PyDict>,
        dispatcher: &Bound<'py, Dispatcher>,
    ) -> PyResult<()> {
        let key = intern!(module.py(), Dispatcher::KEY);
        state.set_item(key, dispatcher)?;
        if is_instrumented(module, state)? {
            return Ok(());
        }
        match &self.kept_call {
            Some(kept_call) => {
                *dispatcher.get().guard.lock() = Some(self.class.clone().unbind());
                keep_class(state, kept_call, &self.class)
            }
            None => set_class(module, &self.class),
        }
        .or_else(|error| state.del_item(key).and(Err(error)))
    }
}

/// Returns the reference of an instrumented module's dispatcher to its module; None for a plain
/// module.
pub fn module_ref(module: &Bound<'_, PyAny>) -> PyResult<Option<Arc<ModuleRef>>> {
    let reference = PyWeakrefReference::new(module)?.unbind();
    let dispatcher = dispatcher_in(module, &instance_dict(module)?)?;
    Ok(dispatcher.map(|dispatcher| dispatcher.get().refer(reference)))
}

/// True for modules that are never instrumented: wrappers have their own registry, and
/// `HookedRootModule.wrap` uses the registry of the wrapped model.
pub fn has_hooks_elsewhere(module: &Bound<'_, PyAny>) -> PyResult<bool> {
    static WRAPPER: Once<Py<PyType>> = Once::new();
    let wrapper = WRAPPER.import(
        module.py(),
        "ferrohook.attach.wrapper",
        "TransparentWrapper",
    )?;
    module.get_type().is_subclass(wrapper)
}

/// Returns the registry of an instrumented or wrapped module.
pub fn registry_of<'py>(module: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Registry>> {
    let py = module.py();
    if let Ok(wrapper) = module.cast::<HookedBase>() {
        return wrapper.get().registry(py).cloned();
    }
    let Some(dispatcher) = dispatcher_in(module, &instance_dict(module)?)? else {
        return Err(hook_error(
            py,
            format!(
                "this {} is no longer instrumented: its hooks were removed",
                type_name(module)
            ),
        ));
    };
    Ok(dispatcher.get().registry(py).clone())
}

/// Module, hook, and the module's name in the model, if known.
type Registration<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<String>);

/// Registers hooks, each with its module, in order. Those before one that is refused are registered.
pub fn register_each<'py>(
    hooks: impl Iterator<Item = PyResult<Registration<'py>>>,
    phase: Phase,
    placement: Placement,
    options: HookOptions,
    audience: Audience<'_, 'py>,
) -> impl Iterator<Item = PyResult<Py<HookHandle>>> {
    hooks.map(move |each| {
        let (module, hook, name) = each?;
        let (py, name) = (module.py(), name.as_deref());
        let registry = registry_of(&module)?;
        let registry = registry.get();
        let audience = audience.clone_ref(py);
        let handle = registry.register(phase, &hook, placement, options, audience, name)?;
        Py::new(py, handle)
    })
}

/// Registers an attachment that `release_unused(module)` releases; a wrapper has none.
pub fn release_when_unused(
    module: &Bound<'_, PyAny>,
    attachment: Box<dyn Release>,
) -> PyResult<()> {
    if !has_hooks_elsewhere(module)?
        && let Some(dispatcher) = dispatcher_in(module, &instance_dict(module)?)?
    {
        dispatcher.get().global_hooks.add(attachment);
    }
    Ok(())
}

/// Releases the attachments of global hooks on a module, if each of their hooks is removed;
/// a copy, if it was instrumented only for hooks.
#[pyfunction]
pub fn release_unused(module: &Bound<'_, PyAny>) -> PyResult<()> {
    if has_hooks_elsewhere(module)? {
        return Ok(());
    }
    let Some(dispatcher) = dispatcher_in(module, &instance_dict(module)?)? else {
        return Ok(());
    };
    dispatcher.get().global_hooks.release_unused(module.py())?;
    if !dispatcher.get().explicit() {
        release_copy(module)?;
    }
    Ok(())
}

fn dispatcher_in<'py>(
    module: &Bound<'py, PyAny>,
    state: &Bound<'py, PyDict>,
) -> PyResult<Option<Bound<'py, Dispatcher>>> {
    let found = state.get_item(intern!(state.py(), Dispatcher::KEY))?;
    // None: the dict was pickled and restored by other code.
    let found = found.and_then(|found| found.cast_into::<Dispatcher>().ok());
    Ok(found.filter(|found| found.get().serves(module)))
}

/// True if the calls of a module run by its dispatcher.
fn is_instrumented(module: &Bound<'_, PyAny>, state: &Bound<'_, PyDict>) -> PyResult<bool> {
    Ok(instrumented_from(module)?.is_some() || kept_call_in(state)?.is_some())
}

/// Lets a module keep its class. `id`: key of the guard, an int of torch's own counter, as libraries
/// expect.
fn keep_class(
    state: &Bound<'_, PyDict>,
    call: &Bound<'_, KeptCall>,
    id: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = state.py();
    pre_hooks(state)?.set_item(id, KeptGuard)?;
    state.set_item(intern!(py, KeptCall::KEY), call)
}

/// Pre-hook of torch on a module that keeps its class: raises where the module's `compile` took the
/// place of the call that runs its hooks. It is there for Dynamo too, which calls `forward` of a module
/// without hooks, and guards that it has none; and for fast paths of torch that call no submodules.
#[pyclass(frozen, module = "ferrohook._core")]
struct KeptGuard;

#[pymethods]
impl KeptGuard {
    #[getter]
    fn __name__(_slf: &Bound<'_, Self>) -> &'static str {
        "keep_class"
    }

    /// Raises; `torch.jit.script` reads it, to compile a hook.
    #[getter]
    fn __globals__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let message = "torch.jit.script cannot compile a module of keep_class: restore it first";
        Err(hook_error(slf.py(), message))
    }

    #[pyo3(signature = (module, _args))]
    fn __call__(
        _slf: &Bound<'_, Self>,
        module: &Bound<'_, PyAny>,
        _args: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (py, state) = (module.py(), instance_dict(module)?);
        let Some(dispatcher) = dispatcher_in(module, &state)? else {
            return Ok(()); // a copy, which has this too
        };
        let registry = dispatcher.get().registry(py).get();
        if is_instrumented(module, &state)? || registry.work().is_none() {
            return Ok(());
        }
        let message = format!(
            "compile() replaced the call that runs the hooks of this {}, so they would not fire: \
             remove the hooks first, or instrument the module without keep_class",
            type_name(module)
        );
        Err(hook_error(py, message))
    }

    /// Is saved as a function that does nothing, of the standard library: a copy of the module loads
    /// where ferrohook is not.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let py = slf.py();
        let handler = py.import("logging")?.getattr("NullHandler")?;
        let getattr = py.import("builtins")?.getattr("getattr")?;
        (getattr, (handler, "handle")).into_pyobject(py)
    }
}

/// Returns the module's dict of torch's pre-hooks: an `OrderedDict`, which `PyDict` would change past
/// its order.
fn pre_hooks<'py>(state: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
    state
        .as_any()
        .get_item(intern!(state.py(), "_forward_pre_hooks"))
}

fn kept_call_in<'py>(state: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, KeptCall>>> {
    let found = state.get_item(intern!(state.py(), KeptCall::KEY))?;
    Ok(found.and_then(|found| found.cast_into().ok()))
}

/// Returns the plain class if the module's class was made for instrumented modules.
fn instrumented_from<'py>(module: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = module.py();
    let name = intern!(py, "_made_from");
    for base in module.get_type().mro().iter_borrowed() {
        // No `getattr`: it runs code of a metaclass, and makes an exception where there is none.
        let base = base.cast::<PyType>()?.as_type_ptr();
        // SAFETY: a live class, which keeps its dict alive; null for one of the interpreter's own.
        let namespace = unsafe { Borrowed::from_ptr_or_opt(py, (*base).tp_dict) };
        if let Some(namespace) = namespace
            && let Some(bases) = namespace.cast::<PyDict>()?.get_item(name)?
        {
            return bases.get_item(1).map(Some);
        }
    }
    Ok(None)
}

/// Sets the actual class: `__class__` of an instrumented module reads as the original one.
///
/// Runs no Python code but audit hooks, for callers that hold the lock.
fn set_class(module: &Bound<'_, PyAny>, class: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = module.py();
    let own = own_class(py)?.as_ptr();
    // SAFETY: live objects; the descriptor of `object.__class__` has this slot.
    let set = unsafe {
        let set = (*ffi::Py_TYPE(own)).tp_descr_set;
        set.map_or(-1, |set| set(own, module.as_ptr(), class.as_ptr()))
    };
    if set == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(py))
    }
}

/// Returns `object.__dict__["__class__"]`.
fn own_class(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static CLASS: Once<Py<PyAny>> = Once::new();
    let own = CLASS.get_or_try_init(py, || {
        let object = py.get_type::<PyAny>();
        let namespace = object.getattr(intern!(py, "__dict__"))?;
        namespace.get_item("__class__").map(Bound::unbind)
    })?;
    Ok(own.bind(py))
}

/// Explains the error of [`set_class`].
fn refused(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyTypeError>(py) {
        return error;
    }
    let message = format!("its class cannot be changed: {}", error.value(py));
    caused(py, hook_error(py, message), error)
}
