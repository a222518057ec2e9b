//! Counter of the changes of a frame's hooks, for whoever remembers how they merge.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Changes of one frame's hooks: registered, in another order, ended.
#[derive(Default)]
pub struct Changes {
    count: AtomicU64,
    /// Counter of the batch that the frame is a member of.
    batch: Mutex<Option<Arc<AtomicU64>>>,
}

impl Changes {
    /// Counts a change, once it is made.
    pub fn note(&self) {
        // Release pairs with the acquire in `count`: who reads the number finds the change.
        self.count.fetch_add(1, Ordering::Release);
        // Counted first: a batch that is joined behind this lock reads the number afterwards.
        if let Some(batch) = &*self.batch.lock() {
            batch.fetch_add(1, Ordering::Release);
        }
    }

    /// Number of changes so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Counts changes for a batch too, from now on; false if they are counted for another.
    pub fn join(&self, batch: &Arc<AtomicU64>) -> bool {
        let mut joined = self.batch.lock();
        let free = joined.is_none();
        if free {
            *joined = Some(Arc::clone(batch));
        }
        free
    }

    /// Counts changes for no batch any more.
    pub fn part(&self) {
        *self.batch.lock() = None;
    }

    /// True while changes are counted for a batch.
    pub fn joined(&self) -> bool {
        self.batch.lock().is_some()
    }
}
