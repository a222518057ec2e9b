//! Counter of the changes of a frame's hooks, which a cache of programs checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Changes of one frame's hooks: registered, in another order, ended.
#[derive(Default)]
pub struct Changes {
    count: AtomicU64,
    /// Counter of who counts the changes of several frames.
    other: Mutex<Option<Arc<AtomicU64>>>,
}

impl Changes {
    /// Counts a change, once it is made.
    pub fn note(&self) {
        // Release pairs with the acquire in `count`: who reads the number finds the change. Counted
        // before the lock: who sets another counter, and then reads the number, misses none.
        self.count.fetch_add(1, Ordering::Release);
        if let Some(other) = &*self.other.lock() {
            other.fetch_add(1, Ordering::Release);
        }
    }

    /// Number of changes so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Counts changes from now on by another counter too; None: by none.
    pub fn count_for(&self, other: Option<&Arc<AtomicU64>>) {
        *self.other.lock() = other.map(Arc::clone);
    }
}
