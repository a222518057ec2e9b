//! Trampolines: C functions around Rust ones, for method descriptors on classes that are not ours.
//!
//! From pyo3's private module `impl_`, named in no other file. The public way, `extern "C"` around
//! `Python::attach`, looks up the thread state in each call; a trampoline needs the caller to be
//! attached, catches panics and sets the exception. `tests/project/test_release.py` fails when pyo3's minor
//! version changes, as a reminder to check this file.

pub use pyo3::impl_::trampoline::get_trampoline_function;
