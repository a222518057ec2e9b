//! Attachments that are released with their owner, a frame or a dispatcher.

use std::mem;

use parking_lot::Mutex;
use pyo3::prelude::*;

/// Modules and hooks that are released together, once.
pub trait Release: Send + Sync {
    /// Returns true for the call that released them.
    fn release(&self, py: Python<'_>) -> PyResult<bool>;
    fn released(&self) -> bool;
    /// True if each of its hooks is removed.
    fn unused(&self) -> bool;
}

/// List of attachments.
#[derive(Default)]
pub struct Releases(Mutex<Vec<Box<dyn Release>>>);

impl Releases {
    pub fn add(&self, attachment: Box<dyn Release>) {
        let mut attachments = self.0.lock();
        // Drops released ones when the list is full: adding stays amortised constant-time.
        if attachments.len() == attachments.capacity() {
            attachments.retain(|each| !each.released());
        }
        attachments.push(attachment);
    }

    /// Takes the attachments out.
    pub fn take(&self) -> Self {
        Self(Mutex::new(mem::take(&mut *self.0.lock())))
    }

    pub fn extend(&self, others: Self) {
        self.0.lock().extend(others.0.into_inner());
    }

    /// Releases all, even if one fails.
    pub fn release(&self, py: Python<'_>) -> PyResult<()> {
        let attachments = mem::take(&mut *self.0.lock());
        let released = attachments.iter().map(|each| each.release(py).map(drop));
        released.fold(Ok(()), Result::and)
    }

    /// Releases those whose hooks are all removed.
    pub fn release_unused(&self, py: Python<'_>) -> PyResult<()> {
        let unused: Vec<_> = {
            let mut attachments = self.0.lock();
            let all = mem::take(&mut *attachments).into_iter();
            let (unused, used) = all.partition(|each| each.unused());
            *attachments = used;
            unused
        };
        let released = unused.iter().map(|each| each.release(py).map(drop));
        released.fold(Ok(()), Result::and)
    }
}
