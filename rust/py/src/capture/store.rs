//! Recorded values by name, and the budget of their bytes.

use std::collections::VecDeque;
use std::thread::{self, ThreadId};

use pyo3::prelude::*;
use rustc_hash::FxHashSet;

/// A tensor that was kept, and its version where reading checks that.
pub struct KeptTensor {
    pub value: Py<PyAny>,
    pub version: Option<i64>,
    pub gradient: Option<Gradient>,
}

pub struct Gradient {
    pub value: Py<PyAny>,
    pub bytes: usize,
}

/// What one module's one call left.
pub struct Kept {
    pub serial: u64,
    pub value: Py<PyAny>,
    pub tensors: Vec<KeptTensor>,
    pub bytes: usize,
}

#[derive(Default)]
pub struct Store {
    /// For each name what its last calls left, the oldest first.
    pub kept: Vec<VecDeque<Kept>>,
    /// The names in the order in which they first ran.
    pub ran: Vec<usize>,
    pub serial: u64,
    pub bytes: usize,
    /// Of the module whose calls are to be ended.
    pub calls: Vec<RootCall>,
}

/// A call that ends when all names have run in it.
pub struct RootCall {
    pub thread: ThreadId,
    pub ran: FxHashSet<usize>,
}

impl Store {
    pub fn of(names: usize) -> Self {
        let mut store = Self::default();
        store.kept.resize_with(names, VecDeque::new);
        store
    }

    /// Notes that a name ran; whether that ends a call which is under way on this thread.
    pub fn ends_call(&mut self, index: usize, names: usize) -> bool {
        let thread = thread::current().id();
        let own = self.calls.iter().rposition(|call| call.thread == thread);
        // On another thread: what that was started for by the forward counts, and ends nothing.
        let latest = self.calls.len().checked_sub(1);
        let Some(call) = own.or(latest).map(|at| &mut self.calls[at]) else {
            return false;
        };
        call.ran.insert(index);
        own.is_some() && call.ran.len() == names
    }

    /// True if `more` bytes in place of `freed` ones stay within the budget, which they then count
    /// for.
    pub fn afford(&mut self, more: usize, freed: usize, budget: Option<usize>) -> bool {
        let held = self.bytes - freed + more;
        let affordable = budget.is_none_or(|most| held <= most);
        if affordable {
            self.bytes = held;
        }
        affordable
    }
}
