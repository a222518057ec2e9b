//! CPython's version tags of dicts (PEP 509), which 3.13 no longer maintains.
//!
//! They shorten the idle call of an instrumented module. To be deleted with support for CPython
//! 3.12, whose end of life is 2028-10.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Guard that holds while a dict's version tag, and so the dict, is unchanged. From CPython 3.13 on
/// it never holds.
#[derive(Default)]
pub struct DictGuard {
    place: AtomicPtr<ffi::PyDictObject>,
    version: AtomicU64,
}

/// Version tag of a dict at one time.
pub struct DictVersion {
    place: *mut ffi::PyDictObject,
    version: u64,
}

impl DictVersion {
    /// Call before reading the dict: reading may run code that changes it.
    pub fn of(dict: &Bound<'_, PyDict>) -> Self {
        let place = dict.as_ptr().cast();
        // SAFETY: a live dict.
        let version = unsafe { version(place) };
        Self { place, version }
    }
}

// Relaxed: under the GIL, or only a hint.
impl DictGuard {
    /// Guards the dict at that version.
    pub fn set(&self, at: &DictVersion) {
        self.place.store(at.place, Ordering::Relaxed);
        self.version.store(at.version, Ordering::Relaxed);
    }

    /// True if it guards this dict and the dict is unchanged.
    #[inline]
    pub fn holds(&self, dict: &Bound<'_, PyDict>) -> bool {
        let place = dict.as_ptr().cast();
        if self.place.load(Ordering::Relaxed) != place {
            return false;
        }
        // SAFETY: a live dict.
        let version = unsafe { version(place) };
        version != 0 && version == self.version.load(Ordering::Relaxed)
    }
}

/// True if guards can hold.
pub const VERSIONS: bool = cfg!(not(Py_3_13));

/// The version tag; 0 where there is none.
///
/// # Safety
///
/// A live dict.
#[cfg_attr(
    all(Py_3_12, not(Py_3_13)),
    expect(deprecated, reason = "still maintained in 3.12")
)]
unsafe fn version(dict: *mut ffi::PyDictObject) -> u64 {
    #[cfg(not(Py_3_13))]
    // SAFETY: the caller's promise.
    return unsafe { (*dict).ma_version_tag };
    #[cfg(Py_3_13)]
    {
        let _ = dict;
        0
    }
}
