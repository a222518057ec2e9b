//! CPython's C interface, where pyo3's is missing or slower.

#[cfg(all(Py_3_12, not(Py_3_14)))]
pub mod depth;
pub mod dict;
pub mod dict_version;
pub mod empty_cache;
pub mod heap_type;
pub mod invoke;
pub mod once;
pub mod trampoline;
