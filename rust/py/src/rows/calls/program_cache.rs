//! Programs of a batch, for its next calls and for the next batch of the same members.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use rustc_hash::FxHashMap;

use crate::contexts::frame::FrameId;
use crate::rows::calls::program::Program;
use crate::rows::numbers::BatchRows;

static CACHING: AtomicBool = AtomicBool::new(true);

/// Turns the cache of programs off or on, for tests: the results are the same.
#[pyfunction]
pub fn cache_programs(on: bool) {
    CACHING.store(on, Ordering::Relaxed);
}

/// Cache key: members, the versions of their hooks, and rows.
#[derive(PartialEq, Eq)]
pub struct ProgramKey {
    /// Each member, the number of changes of its hooks, and its rows.
    pub members: Vec<(FrameId, u64, BatchRows)>,
    pub dim: usize,
}

/// Programs of a batch by module. Modules with their own row layout are not included.
pub struct ProgramCache {
    key: ProgramKey,
    /// Number of changes, since the batch was entered, before the programs were made.
    epoch: u64,
    /// First deadline of a member.
    deadline: Option<Instant>,
    programs: FxHashMap<u64, Arc<Program>>,
}

impl ProgramCache {
    /// Starts for a batch that is entered, with the programs of a former batch of the same key.
    pub fn start(
        key: ProgramKey,
        former: Option<Box<Self>>,
        deadline: Option<Instant>,
    ) -> (Box<Self>, Option<Box<Self>>) {
        let (programs, unused) = match former {
            Some(former) if former.key == key => (former.programs, None),
            other => (FxHashMap::default(), other),
        };
        let started = Self {
            key,
            epoch: 0,
            deadline,
            programs,
        };
        (Box::new(started), unused)
    }

    /// Finds the program at the module with this id. `epoch`: number of changes since the batch was
    /// entered. Returns stale ones, to be dropped without a lock.
    pub fn find(
        &mut self,
        module: u64,
        epoch: u64,
        deadline: impl FnOnce() -> Option<Instant>,
    ) -> Result<Option<Arc<Program>>, FxHashMap<u64, Arc<Program>>> {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.deadline = deadline();
            return Err(mem::take(&mut self.programs));
        }
        let passed = |deadline| Instant::now() > deadline;
        if !CACHING.load(Ordering::Relaxed) || self.deadline.is_some_and(passed) {
            return Ok(None);
        }
        Ok(self.programs.get(&module).cloned())
    }

    /// Adds the program at the module with this id, unless a hook changed since `epoch`, which was
    /// read before its hooks were looked for. Returns the one to be dropped without a lock.
    pub fn add(&mut self, module: u64, epoch: u64, program: Arc<Program>) -> Option<Arc<Program>> {
        if self.epoch == epoch {
            self.programs.insert(module, program)
        } else {
            Some(program)
        }
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.programs
            .values()
            .try_for_each(|program| program.traverse(visit))
    }
}
