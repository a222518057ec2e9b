//! Calls into Python code that may run for long (hooks, modules, gradient taps), and waits without
//! the GIL.
//!
//! Before CPython 3.14 a daemon thread that takes the GIL during finalization is ended by
//! `pthread_exit`, which unwinds its stack; unwinding into a Rust frame aborts the process. Here
//! such a thread sleeps for ever instead, as in 3.14.

use std::hint::black_box;
use std::{mem, ptr};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

// pyo3's declarations without the promise not to unwind. Call them through `black_box`: the
// optimiser may rely on pyo3's promise about the same function.
unsafe extern "C-unwind" {
    fn PyEval_RestoreThread(thread: *mut ffi::PyThreadState);

    fn PyObject_VectorcallDict(
        callable: *mut ffi::PyObject,
        args: *const *mut ffi::PyObject,
        nargsf: usize,
        kwargs: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;

    fn PyObject_Call(
        callable: *mut ffi::PyObject,
        args: *mut ffi::PyObject,
        kwargs: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;
}

type Vectorcall = unsafe extern "C-unwind" fn(
    *mut ffi::PyObject,
    *const *mut ffi::PyObject,
    usize,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

type CallFunction = unsafe extern "C-unwind" fn(
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

/// Guard that parks the thread for ever when the stack unwinds past it.
struct ParkOnUnwind;

impl Drop for ParkOnUnwind {
    #[cold]
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Runs `wait()` with the interpreter released. Unlike `Python::detach` it survives finalization,
/// see above; so `wait` must not touch Python objects, drop them included.
pub fn detached<T>(_: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    struct Detached(*mut ffi::PyThreadState);

    impl Drop for Detached {
        fn drop(&mut self) {
            let restore = black_box(
                PyEval_RestoreThread as unsafe extern "C-unwind" fn(*mut ffi::PyThreadState),
            );
            let guard = ParkOnUnwind;
            // SAFETY: the thread state that this thread saved.
            unsafe { restore(self.0) };
            mem::forget(guard);
        }
    }

    // SAFETY: the interpreter is attached, and attached again before Python is used.
    let _detached = Detached(unsafe { ffi::PyEval_SaveThread() });
    wait()
}

/// Calls `callable(*args)`, for up to four arguments.
#[expect(
    clippy::inline_always,
    reason = "part of the walk of hooks, see `call`"
)]
#[inline(always)]
pub fn call<'py, const N: usize>(
    callable: &Bound<'py, PyAny>,
    args: [&Bound<'py, PyAny>; N],
) -> PyResult<Bound<'py, PyAny>> {
    const { assert!(N <= 4) }
    // Slot before the arguments, which the callee may write: a bound method puts its self there.
    let mut all = [ptr::null_mut(); 5];
    for (slot, arg) in all[1..].iter_mut().zip(args) {
        *slot = arg.as_ptr();
    }
    let nargsf = N | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET;
    // SAFETY: a slot that may be written precedes `N` live objects.
    unsafe { vectorcall(callable, all.as_mut_ptr().add(1), nargsf, None) }
}

/// Calls `function(first, *args, **kwargs)`.
pub fn call_with_first<'py>(
    function: &Bound<'py, PyAny>,
    first: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    const ON_STACK: usize = 8;
    let count = args.len() + 1;
    let mut few = [ptr::null_mut(); ON_STACK];
    let mut many;
    let all: &mut [*mut ffi::PyObject] = if count <= ON_STACK {
        &mut few[..count]
    } else {
        many = vec![ptr::null_mut(); count];
        &mut many
    };
    all[0] = first.as_ptr();
    for (slot, arg) in all[1..].iter_mut().zip(args.iter_borrowed()) {
        *slot = arg.as_ptr();
    }
    // SAFETY: `all` holds `count` objects, which `first` and `args` keep alive.
    unsafe { vectorcall(function, all.as_mut_ptr(), count, kwargs) }
}

/// Calls `callable(*args, **kwargs)`.
pub fn call_with<'py>(
    callable: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = black_box(PyObject_Call as CallFunction);
    let kwargs = kwargs.map_or(ptr::null_mut(), Bound::as_ptr);
    let guard = ParkOnUnwind;
    // SAFETY: live objects of the types that the function takes.
    let result = unsafe { call(callable.as_ptr(), args.as_ptr(), kwargs) };
    mem::forget(guard);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// # Safety
///
/// `args` and `nargsf` follow the vectorcall protocol.
#[inline]
unsafe fn vectorcall<'py>(
    callable: &Bound<'py, PyAny>,
    args: *mut *mut ffi::PyObject,
    nargsf: usize,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = match kwargs {
        None => of_type(callable),
        // A vectorcall function takes keywords in another form.
        Some(_) => None,
    };
    let call = call.unwrap_or_else(|| black_box(PyObject_VectorcallDict as Vectorcall));
    let kwargs = kwargs.map_or(ptr::null_mut(), Bound::as_ptr);
    let guard = ParkOnUnwind;
    // SAFETY: the caller's promise; a live callable; keywords are a dict or null, and null means
    // the same to both kinds of function.
    let result = unsafe { call(callable.as_ptr(), args, nargsf, kwargs) };
    mem::forget(guard);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// Inlined `PyVectorcall_Function`, without its check that the object is callable.
#[inline]
fn of_type(callable: &Bound<'_, PyAny>) -> Option<Vectorcall> {
    let object = callable.as_ptr();
    // SAFETY: a live object. A type with that flag has such a function, or null, at that offset;
    // the signature is the same, without the promise not to unwind.
    unsafe {
        let of = ffi::Py_TYPE(object);
        if ffi::PyType_HasFeature(of, ffi::Py_TPFLAGS_HAVE_VECTORCALL) == 0 {
            return None;
        }
        let place = object.byte_offset((*of).tp_vectorcall_offset);
        place.cast::<Option<Vectorcall>>().read()
    }
}
