//! `EmptyCache`: checks in few instructions that hook dicts are empty.

use std::array;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpython::dict::{Variable, none_or_empty};
use crate::cpython::dict_version::{DictGuard, VERSIONS};

/// Inline cache of variables of one dict, up to `N` of them dicts and the others missing or None.
/// Valid while the dict is unchanged.
pub struct EmptyCache<const N: usize> {
    guard: DictGuard,
    /// Lengths of the variables that are dicts, which the dict keeps alive; else [`NO_DICT`].
    lengths: [AtomicPtr<ffi::Py_ssize_t>; N],
}

static NO_DICT: ffi::Py_ssize_t = 0;

impl<const N: usize> Default for EmptyCache<N> {
    fn default() -> Self {
        Self {
            guard: DictGuard::default(),
            lengths: array::from_fn(|_| AtomicPtr::new(ptr::from_ref(&NO_DICT).cast_mut())),
        }
    }
}

// Relaxed: under the GIL; free-threaded, no guard ever holds.
impl<const N: usize> EmptyCache<N> {
    /// True if each of the variables is missing, None or an empty dict.
    #[inline]
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
            let lengths = self.lengths.iter();
            // SAFETY: the dict is unchanged and keeps the dicts in it alive.
            let lengths = lengths.map(|length| unsafe { *length.load(Ordering::Relaxed) });
            lengths.fold(0, |any, length| any | length) == 0
        })
    }

    /// Reads the variables, and makes the cache valid for them where dicts have versions.
    #[inline(never)]
    pub fn look_up<'a>(
        &self,
        dict: &Bound<'_, PyDict>,
        variables: impl IntoIterator<Item = &'a Variable>,
    ) -> PyResult<bool> {
        let version = DictGuard::start(dict);
        let fresh = Self::default();
        let mut free = fresh.lengths.iter();
        let (mut empty, mut fits) = (true, true);
        for variable in variables {
            let Some(value) = variable.get(dict)?.filter(|value| !value.is_none()) else {
                continue;
            };
            empty &= none_or_empty(&value);
            match (value.cast::<PyDict>(), free.next()) {
                (Ok(value), Some(length)) => {
                    let value: *mut ffi::PyDictObject = value.as_ptr().cast();
                    // SAFETY: a live dict.
                    length.store(unsafe { &raw mut (*value).ma_used }, Ordering::Relaxed);
                }
                _ => fits = false,
            }
        }
        if VERSIONS {
            self.guard.set(dict, if fits { version } else { 0 }); // 0 is no dict's
            for (length, fresh) in self.lengths.iter().zip(fresh.lengths) {
                length.store(fresh.into_inner(), Ordering::Relaxed);
            }
        }
        Ok(empty)
    }
}
