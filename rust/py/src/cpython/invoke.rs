//! Calls into Python code that may run for long (hooks, modules, what taps gradients), and waiting
//! without the GIL.
//!
//! Before CPython 3.14 a daemon thread that wants the GIL back while the interpreter ends is ended
//! by `pthread_exit`, which unwinds its stack, and unwinding into a frame of Rust's aborts the
//! process. Such a thread sleeps for ever here instead, as 3.14 makes it do.

use std::hint::black_box;
use std::{mem, ptr};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

// As pyo3 declares them, but for the promise not to unwind. To be called through `black_box`: the
// optimiser may have seen pyo3's promise about the same function.
unsafe extern "C-unwind" {
    fn PyEval_RestoreThread(thread: *mut ffi::PyThreadState);

    fn PyObject_VectorcallDict(
        callable: *mut ffi::PyObject,
        args: *const *mut ffi::PyObject,
        nargsf: usize,
        kwargs: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;

    fn PyObject_Vectorcall(
        callable: *mut ffi::PyObject,
        args: *const *mut ffi::PyObject,
        nargsf: usize,
        keywords: *mut ffi::PyObject,
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

type Call = unsafe extern "C-unwind" fn(
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

/// Sleeps for ever when the stack is unwound past it.
struct Unwound;

impl Drop for Unwound {
    #[cold]
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// `wait()` with the interpreter released. Like `Python::detach`, but for what the end of the
/// interpreter does to the thread; so `wait` must not touch Python objects, drop them included.
pub fn detached<T>(_: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    struct Detached(*mut ffi::PyThreadState);

    impl Drop for Detached {
        fn drop(&mut self) {
            let restore = black_box(
                PyEval_RestoreThread as unsafe extern "C-unwind" fn(*mut ffi::PyThreadState),
            );
            let unwound = Unwound;
            // SAFETY: the state that this thread saved.
            unsafe { restore(self.0) };
            mem::forget(unwound);
        }
    }

    // SAFETY: the interpreter is attached, and attached again before anybody can use it.
    let _detached = Detached(unsafe { ffi::PyEval_SaveThread() });
    wait()
}

/// `callable(*args)`, for up to four arguments.
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
    // The slot before the arguments is the callee's, a bound method's for its self.
    let mut all = [ptr::null_mut(); 5];
    for (slot, arg) in all[1..].iter_mut().zip(args) {
        *slot = arg.as_ptr();
    }
    let nargsf = N | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET;
    // SAFETY: `N` live objects stand behind a slot that may be written.
    unsafe { vectorcall(callable, all.as_mut_ptr().add(1), nargsf, None) }
}

/// `callable(arg, keyword=value)`; `keywords` holds the one name.
pub fn call_with_keyword<'py>(
    callable: &Bound<'py, PyAny>,
    arg: &Bound<'py, PyAny>,
    keywords: &Bound<'py, PyTuple>,
    value: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut all = [ptr::null_mut(), arg.as_ptr(), value.as_ptr()];
    let call = black_box(PyObject_Vectorcall as Vectorcall);
    let nargsf = 1 | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET;
    let unwound = Unwound;
    // SAFETY: a slot that may be written, a live object for the one argument and one for the one
    // keyword, and a tuple of its name.
    let result = unsafe {
        call(
            callable.as_ptr(),
            all.as_mut_ptr().add(1),
            nargsf,
            keywords.as_ptr(),
        )
    };
    mem::forget(unwound);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// `function(first, *args, **kwargs)`.
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
    // SAFETY: `all` holds `count` live objects, kept alive by `first` and `args` throughout.
    unsafe { vectorcall(function, all.as_mut_ptr(), count, kwargs) }
}

/// `callable(*args, **kwargs)`.
pub fn call_with<'py>(
    callable: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = black_box(PyObject_Call as Call);
    let kwargs = kwargs.map_or(ptr::null_mut(), Bound::as_ptr);
    let unwound = Unwound;
    // SAFETY: live objects of the types that the function takes.
    let result = unsafe { call(callable.as_ptr(), args.as_ptr(), kwargs) };
    mem::forget(unwound);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// # Safety
///
/// `args` and `nargsf` are as the vectorcall protocol wants them.
#[inline]
unsafe fn vectorcall<'py>(
    callable: &Bound<'py, PyAny>,
    args: *mut *mut ffi::PyObject,
    nargsf: usize,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = match kwargs {
        None => of_type(callable),
        // The function takes the keywords in another form.
        Some(_) => None,
    };
    let call = call.unwrap_or_else(|| black_box(PyObject_VectorcallDict as Vectorcall));
    let kwargs = kwargs.map_or(ptr::null_mut(), Bound::as_ptr);
    let unwound = Unwound;
    // SAFETY: the caller's promise; the other two are live objects, the second a dict or null, and
    // where it is null the two kinds of function take the same.
    let result = unsafe { call(callable.as_ptr(), args, nargsf, kwargs) };
    mem::forget(unwound);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// What `PyVectorcall_Function` gives, which is a call of its own and asks whether it can be called.
#[inline]
fn of_type(callable: &Bound<'_, PyAny>) -> Option<Vectorcall> {
    let object = callable.as_ptr();
    // SAFETY: a live object. One of a type with that flag has such a function, or null, at that
    // place; the signature is the same, without the promise not to unwind.
    unsafe {
        let of = ffi::Py_TYPE(object);
        if ffi::PyType_HasFeature(of, ffi::Py_TPFLAGS_HAVE_VECTORCALL) == 0 {
            return None;
        }
        let place = object.byte_offset((*of).tp_vectorcall_offset);
        place.cast::<Option<Vectorcall>>().read()
    }
}
