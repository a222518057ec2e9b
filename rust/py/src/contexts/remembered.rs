//! Merged hooks of a batch's members, for its next calls and for the next batch of the same members.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pyo3::gc::{PyTraverseError, PyVisit};
use rustc_hash::FxHashMap;

use crate::hooks::members::MergedHooks;
use crate::hooks::merged::changes;
use crate::torch::rows::Rows;

/// Id of a frame: unique in the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FrameId(u64);

impl Default for FrameId {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: uniqueness needs atomicity alone.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Merged hooks of the members of a batch, by module. They hold while no hook changes.
pub struct Remembered {
    /// The members, and their rows.
    members: Vec<(FrameId, Rows)>,
    dim: usize,
    /// Number of changes before they were merged.
    changes: u64,
    /// First deadline of a member.
    deadline: Option<Instant>,
    hooks: FxHashMap<u64, Arc<MergedHooks>>,
}

impl Remembered {
    pub fn new(members: Vec<(FrameId, Rows)>, dim: usize) -> Self {
        Self {
            members,
            dim,
            changes: u64::MAX,
            deadline: None,
            hooks: FxHashMap::default(),
        }
    }

    /// True if they are of these members and rows.
    pub fn is_of<'a>(
        &self,
        members: impl ExactSizeIterator<Item = (FrameId, &'a Rows)>,
        dim: usize,
    ) -> bool {
        let same = self.dim == dim && self.members.len() == members.len();
        same && self
            .members
            .iter()
            .zip(members)
            .all(|(one, other)| (one.0, &one.1) == other)
    }

    /// Finds the hooks of the module with this id. Returns stale ones, to be dropped without a lock.
    pub fn find(
        &mut self,
        module: u64,
        deadline: impl FnOnce() -> Option<Instant>,
    ) -> Result<Option<Arc<MergedHooks>>, FxHashMap<u64, Arc<MergedHooks>>> {
        let changes = changes();
        if self.changes != changes {
            self.changes = changes;
            self.deadline = deadline();
            return Err(mem::take(&mut self.hooks));
        }
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() > deadline)
        {
            return Ok(None);
        }
        Ok(self.hooks.get(&module).cloned())
    }

    /// Remembers the hooks of the module with this id, unless a hook changed since they were looked
    /// for. Returns those to be dropped without a lock.
    pub fn add(&mut self, module: u64, hooks: Arc<MergedHooks>) -> Option<Arc<MergedHooks>> {
        if self.changes == changes() {
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
