//! Merged hooks of a batch's members, for its next calls and for the next batch of the same members.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use rustc_hash::FxHashMap;

use crate::contexts::frame::FrameId;
use crate::rows::calls::merged::MergedHooks;
use crate::rows::numbers::BatchRows;

static REMEMBERING: AtomicBool = AtomicBool::new(true);

/// Turns remembering off or on, for tests: the results are the same.
#[pyfunction]
pub fn remember_merged(on: bool) {
    REMEMBERING.store(on, Ordering::Relaxed);
}

/// All that the merged hooks of a batch depend on, but for changes while it is entered.
#[derive(PartialEq, Eq)]
pub struct RememberedKey {
    /// Each member, the number of changes of its hooks, and its rows.
    pub members: Vec<(FrameId, u64, BatchRows)>,
    pub dim: usize,
}

/// Merged hooks of the members of a batch, by module. Modules with their own row layout are not
/// included.
pub struct Remembered {
    key: RememberedKey,
    /// Number of changes, since the batch was entered, before the hooks were merged.
    epoch: u64,
    /// First deadline of a member.
    deadline: Option<Instant>,
    hooks: FxHashMap<u64, Arc<MergedHooks>>,
}

impl Remembered {
    /// Starts for a batch that is entered, with the hooks of a former batch of the same key.
    pub fn start(
        key: RememberedKey,
        former: Option<Box<Self>>,
        deadline: Option<Instant>,
    ) -> (Box<Self>, Option<Box<Self>>) {
        let (hooks, unused) = match former {
            Some(former) if former.key == key => (former.hooks, None),
            other => (FxHashMap::default(), other),
        };
        let started = Self {
            key,
            epoch: 0,
            deadline,
            hooks,
        };
        (Box::new(started), unused)
    }

    /// Finds the hooks of the module with this id. `epoch`: number of changes since the batch was
    /// entered. Returns stale ones, to be dropped without a lock.
    pub fn find(
        &mut self,
        module: u64,
        epoch: u64,
        deadline: impl FnOnce() -> Option<Instant>,
    ) -> Result<Option<Arc<MergedHooks>>, FxHashMap<u64, Arc<MergedHooks>>> {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.deadline = deadline();
            return Err(mem::take(&mut self.hooks));
        }
        let passed = |deadline| Instant::now() > deadline;
        if !REMEMBERING.load(Ordering::Relaxed) || self.deadline.is_some_and(passed) {
            return Ok(None);
        }
        Ok(self.hooks.get(&module).cloned())
    }

    /// Remembers the hooks of the module with this id, unless a hook changed since `epoch`, which
    /// was read before they were looked for. Returns those to be dropped without a lock.
    pub fn add(
        &mut self,
        module: u64,
        epoch: u64,
        hooks: Arc<MergedHooks>,
    ) -> Option<Arc<MergedHooks>> {
        if self.epoch == epoch {
            self.hooks.insert(module, hooks)
        } else {
            Some(hooks)
        }
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hooks
            .values()
            .try_for_each(|hooks| hooks.traverse(visit))
    }
}
