//! Trampolines: C functions around Rust ones, for method descriptors on classes that are not ours.
//!
//! From pyo3's private module `impl_`, the one place that names it. The public way,
//! `extern "C"` around `Python::attach`, asks CPython for the thread's state in each call; a
//! trampoline knows that the caller is attached, catches panics and sets the exception.
//! `tests/test_release.py` fails when pyo3's minor version changes, for this file to be checked.

pub use pyo3::impl_::trampoline::get_trampoline_function;
