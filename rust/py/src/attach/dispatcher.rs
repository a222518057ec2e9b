//! `Dispatcher`: the call of an instrumented module, `__call__` and `_call_impl` of its made class.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::PyReferenceError;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference};

use crate::call::call as call_with_hooks;
use crate::contexts::releases::Releases;
use crate::cpython::dict::{get_last, instance_dict};
use crate::cpython::trampoline::get_trampoline_function;
use crate::registry::Registry;
use crate::torch::cache::{CallCache, InstanceCache};
use crate::torch::target::{Target, call_plain};

/// Weak reference to the module that has a dispatcher; to its replacement once quantisation swapped
/// it.
#[derive(Default)]
pub struct ModuleRef(Mutex<Option<Py<PyWeakrefReference>>>);

impl ModuleRef {
    fn set(&self, module: Py<PyWeakrefReference>) {
        *self.0.lock() = Some(module);
    }

    pub fn upgrade<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let module = self.0.lock().as_ref().map(|module| module.clone_ref(py));
        module?.bind(py).upgrade()
    }
}

/// Entry of an instrumented module in its `__dict__`: its hooks, and the inline caches of its
/// calls.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Dispatcher {
    registry: Py<Registry>,
    module: Arc<ModuleRef>,
    /// Shared by the modules of a class.
    class_cache: Py<CallCache>,
    cache: InstanceCache,
    /// Number of reasons for the module to be instrumented.
    reasons: AtomicUsize,
    /// Number of these that are calls of `instrument`, not hooks or captures.
    explicit: AtomicUsize,
    /// True for a copy of an instrumented module that is still to be restored.
    of_copy: AtomicBool,
    /// True if the module is a shallow copy: it shares the hooks of the original.
    pub shares_hooks: bool,
    /// Key of the guard among torch's pre-hooks, if the module keeps its class.
    pub guard: Mutex<Option<Py<PyAny>>>,
    /// Attachments of global hooks.
    pub global_hooks: Releases,
    /// Called once the module is restored.
    when_restored: Mutex<Option<Py<PyAny>>>,
}

#[pymethods]
impl Dispatcher {
    /// True if `instrument` was called, not only a hook or a capture needs the dispatcher.
    #[getter]
    pub fn explicit(&self) -> bool {
        self.explicit.load(Ordering::Relaxed) != 0
    }

    /// Makes the dispatcher of a shallow copy of the module, which shares the hooks.
    pub fn __copy__(&self, py: Python<'_>) -> Self {
        self.for_copy(self.registry.clone_ref(py), true, py)
    }

    /// True if a module that has this in its `__dict__` uses it. A copy of a module with
    /// `keep_class` does not: its entry is the original's.
    pub fn serves(&self, module: &Bound<'_, PyAny>) -> bool {
        self.guard.lock().is_none() || self.is_of(module, false)
    }

    /// The hooks.
    #[getter]
    pub fn registry<'py>(&self, py: Python<'py>) -> &Bound<'py, Registry> {
        self.registry.bind(py)
    }

    /// Sets what is called, once, after the module was restored.
    fn when_restored(&self, call: Py<PyAny>) {
        // The one before is dropped without the lock: that may run any code.
        let before = self.when_restored.lock().replace(call);
        drop(before);
    }

    /// Key of the dispatcher in a module's `__dict__`.
    #[classattr]
    pub const KEY: &'static str = "_ferrohook_dispatcher";

    /// Makes the descriptors `__call__` and `_call_impl`; `module` is `nn.Module`.
    #[staticmethod]
    fn methods<'py>(module: &Bound<'py, PyType>) -> PyResult<[Bound<'py, PyAny>; 2]> {
        Ok([
            method(
                module,
                c"__call__",
                c"__call__($self, /, *args, **kwargs)\n--\n\nRuns the module with its hooks.",
                get_trampoline_function!(cfunction_with_keywords, call),
            )?,
            method(
                module,
                c"_call_impl",
                c"_call_impl($self, /, *args, **kwargs)\n--\n\nRuns the module with its hooks.",
                get_trampoline_function!(cfunction_with_keywords, call_impl),
            )?,
        ])
    }

    /// Makes the dispatcher of a deep copy of the module, with copies of the hooks.
    fn __deepcopy__(&self, py: Python<'_>, memo: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if self.guard.lock().is_some() {
            return Ok(None); // copies of a module with `keep_class` have no hooks
        }
        let options = PyDict::new(py);
        options.set_item("memo", memo)?;
        let deepcopy = py.import("copy")?.getattr("deepcopy")?;
        let copy = py
            .import("functools")?
            .call_method("partial", (deepcopy,), Some(&options))?;
        let registry = Py::new(py, self.registry.get().fork(&copy)?)?;
        Ok(Some(self.for_copy(registry, false, py)))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.registry)?;
        visit.call(&self.class_cache)
    }
}

impl Dispatcher {
    pub fn new(registry: Py<Registry>, class_cache: Py<CallCache>) -> Self {
        Self {
            registry,
            module: Arc::default(),
            class_cache,
            cache: InstanceCache::default(),
            reasons: AtomicUsize::new(0),
            explicit: AtomicUsize::new(0),
            of_copy: AtomicBool::new(false),
            shares_hooks: false,
            guard: Mutex::default(),
            global_hooks: Releases::default(),
            when_restored: Mutex::default(),
        }
    }

    /// Calls what waits for the module to be restored.
    pub fn tell_restored(&self, py: Python<'_>) -> PyResult<()> {
        let call = self.when_restored.lock().take();
        call.map_or(Ok(()), |call| call.call0(py).map(drop))
    }

    /// Counts one more reason for the module to be instrumented; `explicit`: a call of
    /// `instrument`.
    pub fn acquire(&self, explicit: bool) {
        // Relaxed, as below: under the lock for changes of class.
        self.reasons.fetch_add(1, Ordering::Relaxed);
        self.explicit
            .fetch_add(usize::from(explicit), Ordering::Relaxed);
    }

    /// Counts one reason less; returns the number left.
    pub fn release(&self, explicit: bool) -> usize {
        self.explicit
            .fetch_sub(usize::from(explicit), Ordering::Relaxed);
        self.reasons.fetch_sub(1, Ordering::Relaxed) - 1
    }

    /// Returns true, once, if its module is a copy to restore.
    pub fn take_copy(&self) -> bool {
        self.of_copy.swap(false, Ordering::Relaxed)
    }

    /// True if it is the dispatcher of this module; `unknown` if the module is gone, or not set yet.
    pub fn is_of(&self, module: &Bound<'_, PyAny>, unknown: bool) -> bool {
        let own = self.module.upgrade(module.py());
        own.map_or(unknown, |own| own.is(module))
    }

    /// Sets the reference to the module and returns it; a copied dispatcher has none yet.
    pub fn refer(&self, module: Py<PyWeakrefReference>) -> Arc<ModuleRef> {
        self.module.set(module);
        Arc::clone(&self.module)
    }

    /// Makes the dispatcher of the module that replaces this one's: same hooks, same attachments.
    pub fn succeeded(&self, py: Python<'_>, class_cache: Py<CallCache>) -> Self {
        Self {
            module: Arc::clone(&self.module),
            reasons: AtomicUsize::new(self.reasons.load(Ordering::Relaxed)),
            explicit: AtomicUsize::new(self.explicit.load(Ordering::Relaxed)),
            of_copy: AtomicBool::new(self.of_copy.load(Ordering::Relaxed)),
            shares_hooks: self.shares_hooks,
            global_hooks: self.global_hooks.take(),
            ..Self::new(self.registry.clone_ref(py), class_cache)
        }
    }

    fn for_copy(&self, registry: Py<Registry>, shares_hooks: bool, py: Python<'_>) -> Self {
        let copy = Self {
            of_copy: AtomicBool::new(true),
            shares_hooks,
            ..Self::new(registry, self.class_cache.clone_ref(py))
        };
        copy.acquire(self.explicit());
        copy
    }
}

/// Calls `module(*args, **kwargs)`. A class that overrides `__call__` is called by that, which ends
/// in
/// `_call_impl`.
fn dispatch<'py>(
    module: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
    through_call: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    #[cfg(all(Py_3_12, not(Py_3_14)))]
    let _depth = crate::cpython::depth::Depth::enter(py)?;
    let state = instance_dict(module)?;
    // Usually the last entry of the dict.
    let Some(dispatcher) = get_last(&state, intern!(py, Dispatcher::KEY))? else {
        // The module was restored meanwhile, or got another dict.
        return call_plain(module, args, kwargs, through_call);
    };
    let dispatcher = dispatcher.cast_into::<Dispatcher>()?;
    let this = dispatcher.get();
    let class_cache = this.class_cache.get();
    let target = Target::of(module, state, class_cache, &this.cache, through_call)?;
    if let Target::Outer(_) = target {
        return target.call(module, args, kwargs);
    }
    call_with_hooks(module, &target, this.registry.bind(py), args, kwargs)
}

/// Call of an instrumented module that keeps its class: `_compiled_call_impl` in its `__dict__`, which
/// `nn.Module.__call__` calls and copies leave out.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct KeptCall {
    /// Weak: the module's `__dict__` has this.
    module: Py<PyWeakrefReference>,
}

impl KeptCall {
    pub const KEY: &'static str = "_compiled_call_impl";

    pub fn new(module: &Bound<'_, PyAny>) -> PyResult<Self> {
        let module = PyWeakrefReference::new(module)?.unbind();
        Ok(Self { module })
    }
}

#[pymethods]
impl KeptCall {
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let gone = || PyReferenceError::new_err("the module of this call no longer exists");
        let module = self.module.bind(args.py()).upgrade().ok_or_else(gone)?;
        dispatch(&module, args, kwargs, false)
    }
}

/// Makes a method descriptor, which the interpreter calls without binding it first.
fn method<'py>(
    class: &Bound<'py, PyType>,
    name: &'static CStr,
    // In CPython's format, with the signature that `inspect` shows.
    doc: &'static CStr,
    function: ffi::PyCFunctionWithKeywords,
) -> PyResult<Bound<'py, PyAny>> {
    let definition = ffi::PyMethodDef {
        ml_name: name.as_ptr(),
        ml_meth: ffi::PyMethodDefPointer {
            PyCFunctionWithKeywords: function,
        },
        ml_flags: ffi::METH_VARARGS | ffi::METH_KEYWORDS,
        ml_doc: doc.as_ptr(),
    };
    // Leaked: the descriptor refers to it.
    let definition = Box::leak(Box::new(definition));
    // SAFETY: a live class and a leaked definition; returns a new reference, or null with an
    // exception set.
    unsafe {
        Bound::from_owned_ptr_or_err(
            class.py(),
            ffi::PyDescr_NewMethod(class.as_type_ptr(), definition),
        )
    }
}

/// # Safety
///
/// A live object, a tuple, and a dict or null.
unsafe fn enter(
    py: Python<'_>,
    module: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
    through_call: bool,
) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: the caller's promise.
    let (module, args, kwargs) = unsafe {
        (
            Borrowed::from_ptr(py, module),
            Borrowed::from_ptr(py, args),
            Borrowed::from_ptr_or_opt(py, kwargs),
        )
    };
    let args = Bound::cast::<PyTuple>(&args)?;
    let kwargs = kwargs.as_deref().map(Bound::cast::<PyDict>).transpose()?;
    dispatch(&module, args, kwargs, through_call).map(Bound::into_ptr)
}

unsafe fn call(
    py: Python<'_>,
    module: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: by the descriptor's flags the interpreter passes these types.
    unsafe { enter(py, module, args, kwargs, true) }
}

unsafe fn call_impl(
    py: Python<'_>,
    module: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: by the descriptor's flags the interpreter passes these types.
    unsafe { enter(py, module, args, kwargs, false) }
}
