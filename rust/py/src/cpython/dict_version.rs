//! Versions of dicts, which shorten the idle call of a module.
//!
//! Up to CPython 3.12 each dict has a version tag (PEP 509). From 3.13 on a watcher (`PyDict_Watch`)
//! reports changes: the version of a watched dict is the number of changes of all of them, so a
//! change of one ends the guards of all, and the next look-ups renew them.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Guard that holds while a dict is unchanged. Free-threaded it never holds, as a change is reported
/// before it is made.
#[derive(Default)]
pub struct DictGuard {
    place: AtomicPtr<ffi::PyObject>,
    version: AtomicU64,
}

// Relaxed: under the GIL, or only a hint.
impl DictGuard {
    /// Returns the version of a dict, for `set`. Call before reading the dict: reading may run code
    /// that changes it.
    pub fn start(dict: &Bound<'_, PyDict>) -> u64 {
        source::start(dict)
    }

    /// Guards the dict at that version.
    pub fn set(&self, dict: &Bound<'_, PyDict>, version: u64) {
        self.place.store(dict.as_ptr(), Ordering::Relaxed);
        self.version.store(version, Ordering::Relaxed);
    }

    /// True if it guards this dict and the dict is unchanged.
    #[inline]
    pub fn holds(&self, dict: &Bound<'_, PyDict>) -> bool {
        if self.place.load(Ordering::Relaxed) != dict.as_ptr() {
            return false;
        }
        let version = source::version(dict);
        version != 0 && version == self.version.load(Ordering::Relaxed)
    }
}

/// True if guards can hold.
pub const VERSIONS: bool = cfg!(not(Py_GIL_DISABLED));

#[cfg(not(Py_3_13))]
mod source {
    use pyo3::ffi;
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    /// Returns the version of a dict.
    #[cfg_attr(Py_3_12, expect(deprecated, reason = "still maintained in 3.12"))]
    pub fn version(dict: &Bound<'_, PyDict>) -> u64 {
        // SAFETY: a live dict.
        unsafe { (*dict.as_ptr().cast::<ffi::PyDictObject>()).ma_version_tag }
    }

    pub use version as start;
}

#[cfg(all(Py_3_13, not(Py_GIL_DISABLED)))]
mod source {
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicU64, Ordering};

    use pyo3::ffi;
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyTuple, PyType};

    use crate::cpython::once::Once;

    type Watcher = unsafe extern "C" fn(
        c_int,
        *mut ffi::PyObject,
        *mut ffi::PyObject,
        *mut ffi::PyObject,
    ) -> c_int;

    unsafe extern "C" {
        fn PyDict_AddWatcher(watcher: Watcher) -> c_int;
        fn PyDict_Watch(watcher: c_int, dict: *mut ffi::PyObject) -> c_int;
    }

    /// Number of changes of watched dicts so far, and one.
    static CHANGES: AtomicU64 = AtomicU64::new(1);

    /// Called before a watched dict changes or is freed; no other code runs in between.
    unsafe extern "C" fn count(
        _event: c_int,
        _dict: *mut ffi::PyObject,
        _key: *mut ffi::PyObject,
        _value: *mut ffi::PyObject,
    ) -> c_int {
        CHANGES.fetch_add(1, Ordering::Relaxed); // under the GIL
        0
    }

    fn watch(watcher: c_int, dict: &Bound<'_, PyDict>) -> PyResult<()> {
        // SAFETY: a watcher of this process, and a live dict.
        match unsafe { PyDict_Watch(watcher, dict.as_ptr()) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(dict.py())),
        }
    }

    /// Registers the watcher. None if the process has none left, or if this CPython does not report
    /// attributes that are set (3.13.0).
    fn register(py: Python<'_>) -> PyResult<Option<c_int>> {
        // SAFETY: the function lives as long as the process.
        let watcher = unsafe { PyDict_AddWatcher(count) };
        if watcher < 0 {
            drop(PyErr::take(py));
            return Ok(None);
        }
        let arguments = ("Watched", PyTuple::empty(py), PyDict::new(py));
        let object = py.get_type::<PyType>().call1(arguments)?.call0()?;
        let names = ["one", "other"];
        object.setattr(names[0], 1)?;
        watch(watcher, &object.getattr("__dict__")?.cast_into()?)?;
        let mut reports = true;
        for name in names {
            let before = CHANGES.load(Ordering::Relaxed);
            object.setattr(name, 2)?;
            reports &= CHANGES.load(Ordering::Relaxed) != before;
        }
        Ok(reports.then_some(watcher))
    }

    /// Returns the version of a dict, which is watched from now on; 0 if it cannot be.
    pub fn start(dict: &Bound<'_, PyDict>) -> u64 {
        static WATCHER: Once<Option<c_int>> = Once::new();
        let py = dict.py();
        let watches = WATCHER
            .get_or_try_init(py, || register(py))
            .and_then(|watcher| {
                watcher.map_or(Ok(false), |watcher| watch(watcher, dict).map(|()| true))
            });
        if watches.unwrap_or(false) {
            CHANGES.load(Ordering::Relaxed)
        } else {
            0
        }
    }

    /// Returns the version of a dict, if it is watched.
    #[inline]
    pub fn version(_dict: &Bound<'_, PyDict>) -> u64 {
        CHANGES.load(Ordering::Relaxed)
    }
}

#[cfg(Py_GIL_DISABLED)]
mod source {
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    /// Returns 0, as there is no version.
    pub fn version(_dict: &Bound<'_, PyDict>) -> u64 {
        0
    }

    pub use version as start;
}
