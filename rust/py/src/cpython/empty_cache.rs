//! `EmptyCache`: tells in few instructions that hook dicts are empty.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpython::dict::{Variable, none_or_empty};
use crate::cpython::dict_version::{DictGuard, DictVersion, VERSIONS};

/// Inline cache of variables of one dict, valid while the dict is unchanged.
#[derive(Default)]
pub struct EmptyCache {
    guard: DictGuard,
    /// Variables that were neither missing nor None, mostly hook dicts. The dict keeps them alive.
    present: [AtomicPtr<ffi::PyObject>; 4],
}

// Relaxed: under the GIL; free-threaded, no guard ever holds.
impl EmptyCache {
    /// True if each of the variables is missing, None or an empty dict.
    pub fn empty(&self, dict: &Bound<'_, PyDict>, variables: &[Variable]) -> PyResult<bool> {
        match self.get(dict) {
            Some(empty) => Ok(empty),
            None => self.look_up(dict, variables),
        }
    }

    /// Like `empty`, of the variables that were looked up last; None if the cache is not valid.
    #[inline]
    pub fn get(&self, dict: &Bound<'_, PyDict>) -> Option<bool> {
        self.guard.holds(dict).then(|| {
            self.present.iter().all(|value| {
                let value = value.load(Ordering::Relaxed);
                // SAFETY: the dict is unchanged and keeps it alive.
                let value = unsafe { Borrowed::from_ptr_or_opt(dict.py(), value) };
                value.is_none_or(|value| none_or_empty(&value))
            })
        })
    }

    /// Reads the variables, and makes the cache valid for them where dicts have versions.
    pub fn look_up<'a>(
        &self,
        dict: &Bound<'_, PyDict>,
        variables: impl IntoIterator<Item = &'a Variable>,
    ) -> PyResult<bool> {
        let now = DictVersion::of(dict);
        let mut present = [ptr::null_mut(); 4];
        let mut places = present.iter_mut();
        let (mut empty, mut fits) = (true, true);
        for variable in variables {
            let Some(value) = variable.get(dict)?.filter(|value| !value.is_none()) else {
                continue;
            };
            empty &= none_or_empty(&value);
            match places.next() {
                Some(place) => *place = value.as_ptr(),
                None => fits = false,
            }
        }
        if VERSIONS && fits {
            self.guard.set(&now);
            for (place, value) in self.present.iter().zip(present) {
                place.store(value, Ordering::Relaxed);
            }
        }
        Ok(empty)
    }
}
