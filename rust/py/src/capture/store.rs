//! Recorded values by name, and the budget of their bytes.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rustc_hash::FxHashSet;

use crate::contexts::calls::Calls;
use crate::rows::numbers::Rows;
use crate::rows::places::{Position, Token, TokenPositions};
use crate::torch::made::{self, StreamOrder};
use crate::torch::tensors::{copied, map_tensors, owned, version, version_if_any};

/// A stored tensor, and its version if reading checks that.
pub struct KeptTensor {
    pub value: Py<PyAny>,
    pub version: Option<i64>,
    pub gradient: Option<Gradient>,
    /// True if autograd recorded it, so that a gradient may come.
    pub recorded: bool,
    /// Order of values that readers on other streams made; the others know of the call.
    pub order: StreamOrder,
}

impl KeptTensor {
    /// Copy that a reader just made and that shares no memory. `checks`: a version tag detects
    /// writes, which only its readers can make. None if no later reader may have it.
    pub fn copied(tensor: &Bound<'_, PyAny>, checks: bool) -> PyResult<Option<Self>> {
        let Some(order) = StreamOrder::of(&PyTuple::new(tensor.py(), [tensor])?)? else {
            return Ok(None);
        };
        let version = if checks {
            version_if_any(tensor)?
        } else {
            None
        };
        Ok(Some(Self {
            value: tensor.clone().unbind(),
            version,
            gradient: None,
            recorded: false,
            order,
        }))
    }

    /// Returns the tensor for a reader.
    pub fn stored<'py>(&self, py: Python<'py>) -> StoredTensor<'py> {
        StoredTensor {
            value: self.value.bind(py).clone(),
            version: self.version,
            order: self.order.clone_ref(py),
        }
    }
}

/// A stored tensor on its way to a reader.
pub struct StoredTensor<'py> {
    pub value: Bound<'py, PyAny>,
    version: Option<i64>,
    order: StreamOrder,
}

impl StoredTensor<'_> {
    /// True if it was not changed in place since.
    pub fn is_current(&self) -> PyResult<bool> {
        Ok(match self.version {
            Some(stored) => version(&self.value)? == stored,
            None => true,
        })
    }

    /// Orders the current stream, which is about to read the tensor, after its earlier uses.
    pub fn begin_read(&self) -> PyResult<()> {
        self.order.begin_use(self.value.py())?;
        made::read(&self.value)
    }
}

pub struct Gradient {
    /// Gradients of the backward passes, to be summed, with their versions if reading checks them;
    /// copies to the CPU may be on their way.
    pub passes: Vec<(Py<PyAny>, Option<i64>)>,
    pub bytes: usize,
}

/// Stored value of one call of a module.
pub struct Kept {
    pub serial: u64,
    pub value: Py<PyAny>,
    pub tensors: Vec<KeptTensor>,
    pub bytes: usize,
    /// True if its tensors may share memory with rows of other requests, until it is read.
    pub shared: bool,
    /// Rows of the tensors that are the value's, narrowed when it is read; None: all.
    pub rows: Option<KeptRows>,
    /// Positions of the tokens in their request, if known.
    pub positions: Option<TokenPositions>,
}

/// Rows of stored tensors that belong to one member of a batch.
#[derive(Clone)]
pub struct KeptRows {
    pub rows: Rows,
    pub dim: usize,
    /// Number of rows of the tensors that have them.
    pub size: usize,
    /// True for each tensor of the value that has them.
    pub covered: Arc<[bool]>,
}

impl Kept {
    /// Returns the value as it is read, with a view of its rows.
    pub fn view<'py>(&self, py: Python<'py>) -> View<'py> {
        View {
            stored: self.value.bind(py).clone(),
            tensors: self.tensors.iter().map(|each| each.stored(py)).collect(),
            rows: self.rows.clone(),
            positions: self.positions.clone(),
            shared: self.shared,
        }
    }

    /// True if it is stored as it was when a view was taken of it.
    pub fn is_of(&self, view: &View<'_>) -> bool {
        let same = match (&self.positions, &view.positions) {
            (Some(own), Some(of_view)) => Arc::ptr_eq(&own.values, &of_view.values),
            (None, None) => true,
            _ => false,
        };
        same && self.value.is(&view.stored)
    }
}

/// Value of a call, on its way to a reader.
pub struct View<'py> {
    stored: Bound<'py, PyAny>,
    tensors: Vec<StoredTensor<'py>>,
    rows: Option<KeptRows>,
    pub positions: Option<TokenPositions>,
    pub shared: bool,
}

impl<'py> View<'py> {
    /// True if no tensor was changed in place since.
    pub fn is_current(&self) -> PyResult<bool> {
        for tensor in &self.tensors {
            if !tensor.is_current()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Orders the current stream, which is about to read the tensors, after their earlier uses.
    pub fn begin_read(&self) -> PyResult<()> {
        self.tensors.iter().try_for_each(StoredTensor::begin_read)
    }

    /// True if one of its tensors, by number, has the rows.
    pub fn covers(&self, tensor: usize) -> bool {
        self.rows
            .as_ref()
            .is_none_or(|rows| rows.covered.get(tensor) == Some(&true))
    }

    /// Returns the rows, which may be a view of the batch's tensor.
    pub fn narrowed(&self) -> PyResult<Bound<'py, PyAny>> {
        self.narrowed_with(|tensor| Ok(tensor.clone()))
    }

    /// Returns the rows: views of the tensors that have them. `other` gets the others, which readers
    /// share.
    fn narrowed_with(
        &self,
        other: impl Fn(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(kept) = &self.rows else {
            return Ok(self.stored.clone());
        };
        let mut covered = kept.covered.iter();
        map_tensors(&self.stored, &mut |tensor| match covered.next() {
            Some(true) if kept.rows.all(kept.size) => Ok(tensor.clone()),
            Some(true) => kept.rows.narrow(tensor, kept.dim),
            _ => other(tensor),
        })
    }

    /// Copies the rows out of the batch's tensor. If later readers may have the copy, it replaces the
    /// stored value: the copy is made once, and the tensor of the batch is released.
    pub fn owned(
        &self,
        index: usize,
        store: &Mutex<Store>,
        checks: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut tensors = Vec::new();
        let copy = map_tensors(&self.narrowed_with(copied)?, &mut |tensor| {
            let value = owned(tensor)?;
            tensors.push(KeptTensor::copied(&value, checks)?);
            Ok(value)
        })?;
        let Some(tensors) = tensors.into_iter().collect() else {
            return Ok(copy);
        };
        // Dropped after the lock is released: destructors of tensors run code.
        let _former = {
            let mut store = store.lock();
            let mut calls = store.kept[index].calls.iter_mut();
            let kept = calls.find(|kept| kept.shared && kept.is_of(self));
            kept.map(|kept| {
                kept.shared = false;
                let value = mem::replace(&mut kept.value, copy.clone().unbind());
                let tensors = mem::replace(&mut kept.tensors, tensors);
                (value, tensors, kept.rows.take())
            })
        };
        Ok(copy)
    }
}

/// Place of a tensor in a store.
pub struct TensorSlot {
    /// Index of the name.
    pub index: usize,
    /// Serial number of the call's value.
    pub serial: u64,
    pub position: usize,
}

/// Values of one name.
#[derive(Default)]
pub struct Values {
    /// Values of the last calls, the oldest first. For a value joined from many calls, only the calls
    /// with tokens that are the last at their position.
    pub calls: VecDeque<Kept>,
    /// Number of calls so far.
    pub count: usize,
    /// Number of these calls whose values were dropped for later ones.
    pub dropped: usize,
    /// Last position of each row so far.
    ends: Vec<Position>,
}

/// Fate of a stored value when another one is stored.
enum Fate {
    Stays,
    /// Another one takes its place.
    Goes,
    /// Some of its tokens ran again: the positions of the remaining tokens, the bytes of the others.
    Partly(TokenPositions, usize),
}

/// Stored values that a new one replaces.
#[derive(Default)]
pub struct Replacing {
    /// Number of the oldest values that go.
    oldest: usize,
    /// Fates of the values after them, in order; the rest stays.
    fates: Vec<Fate>,
    /// Number of calls with no token left in the value.
    dropped: usize,
    /// Number of bytes of what goes.
    pub freed: usize,
}

impl Replacing {
    fn of(calls: &VecDeque<Kept>, fates: Vec<Fate>) -> Self {
        let freed = calls.iter().zip(&fates).map(|(kept, fate)| match fate {
            Fate::Stays => 0,
            Fate::Goes => kept.bytes,
            Fate::Partly(_, freed) => *freed,
        });
        Self {
            freed: freed.sum(),
            oldest: 0,
            fates,
            dropped: 0,
        }
    }

    /// True if a part of a stored value may go.
    pub fn is_partial(&self) -> bool {
        !self.fates.is_empty()
    }
}

impl Values {
    /// Finds the values that a new one replaces.
    ///
    /// `keep`: number of calls that are stored; `joins`: tokens of several count as those of one.
    pub fn replaced_by(&self, new: &Kept, keep: usize, joins: bool) -> Replacing {
        let positions = new.positions.as_ref().filter(|_| joins);
        if let Some(positions) = positions.filter(|new| self.are_of(new.sequences)) {
            return Replacing::of(&self.calls, self.run_again(positions));
        }
        let oldest = (self.calls.len() + 1).saturating_sub(keep);
        Replacing {
            freed: self.calls.range(..oldest).map(|kept| kept.bytes).sum(),
            oldest,
            fates: Vec::new(),
            // One call takes the place of all tokens that were put together.
            dropped: if keep == 1 {
                self.count - self.dropped
            } else {
                oldest
            },
        }
    }

    /// True if their tokens are of the sequences with this id.
    pub fn are_of(&self, sequences: u64) -> bool {
        let first = self.calls.front().and_then(|kept| kept.positions.as_ref());
        first.is_some_and(|first| first.sequences == sequences)
    }

    /// Returns what becomes of the stored values as their tokens at some positions run again.
    fn run_again(&self, positions: &TokenPositions) -> Vec<Fate> {
        let ran = |(row, position): &Token| self.ends.get(*row).is_some_and(|end| position <= end);
        let again: FxHashSet<Token> = positions.tokens().flatten().filter(ran).collect();
        if again.is_empty() {
            return Vec::new(); // most often, whatever the number of calls
        }
        self.calls
            .iter()
            .map(|kept| kept.without(|token| again.contains(token)))
            .collect()
    }

    /// Finds the stored rows to drop if tokens from some position on are no part of the request.
    pub fn taken_back(&self, from: Position) -> Replacing {
        let fates = self.calls.iter().map(|kept| match &kept.positions {
            Some(_) => kept.without(|(_, position)| *position >= from),
            None => Fate::Stays,
        });
        Replacing::of(&self.calls, fates.collect())
    }

    /// Takes back stored values, or parts of them. Returns them, to be dropped without a lock.
    pub fn take_back(&mut self, from: Position, replacing: Replacing) -> Vec<Kept> {
        for end in &mut self.ends {
            *end = Position(end.0.min(from.0 - 1));
        }
        self.replace(replacing)
    }

    /// Applies `Replacing` to the stored values. Returns the dropped ones.
    fn replace(&mut self, Replacing { oldest, fates, .. }: Replacing) -> Vec<Kept> {
        let mut replaced: Vec<_> = self.calls.drain(..oldest).collect();
        if fates.is_empty() {
            return replaced;
        }
        let mut stay = Vec::new();
        for (mut kept, fate) in self.calls.drain(..fates.len()).zip(fates) {
            match fate {
                Fate::Goes => replaced.push(kept),
                Fate::Stays => stay.push(kept),
                Fate::Partly(positions, freed) => {
                    kept.bytes -= freed;
                    kept.positions = Some(positions);
                    stay.push(kept);
                }
            }
        }
        for kept in stay.into_iter().rev() {
            self.calls.push_front(kept);
        }
        replaced
    }

    /// Stores a value. Returns the replaced ones, to be dropped without a lock.
    pub fn put(&mut self, new: Kept, replacing: Replacing) -> Vec<Kept> {
        self.count += 1;
        self.dropped += replacing.dropped;
        let replaced = self.replace(replacing);
        if self.calls.is_empty() {
            self.ends.clear();
        }
        for (row, position) in new
            .positions
            .iter()
            .flat_map(TokenPositions::tokens)
            .flatten()
        {
            if self.ends.len() <= row {
                self.ends.resize(row + 1, Position::NOBODY);
            }
            self.ends[row] = self.ends[row].max(position);
        }
        self.calls.push_back(new);
        replaced
    }
}

impl Kept {
    /// Returns what becomes of it as some tokens go.
    fn without(&self, goes: impl Fn(&Token) -> bool) -> Fate {
        let Some(positions) = &self.positions else {
            return Fate::Goes;
        };
        let left = positions.tokens().flatten().count();
        let found = positions.tokens().flatten().filter(|token| goes(token));
        match found.count() {
            0 => Fate::Stays,
            all if all == left => Fate::Goes,
            some => Fate::Partly(positions.without(goes), self.bytes * some / left),
        }
    }

    /// True if most of its tokens ran again.
    pub fn is_sparse(&self) -> bool {
        self.positions.as_ref().is_some_and(|positions| {
            let left = positions.tokens().flatten().count();
            2 * left < positions.values.len()
        })
    }
}

#[derive(Default)]
pub struct Store {
    /// Values by name.
    pub kept: Vec<Values>,
    /// Indices of the names in the order in which they first ran.
    pub ran: Vec<usize>,
    pub serial: u64,
    pub bytes: usize,
    /// Names that ran in the running calls of the module to stop: each ends once all have.
    pub calls: Calls<FxHashSet<usize>>,
}

impl Store {
    pub fn of(names: usize) -> Self {
        let mut store = Self::default();
        store.kept.resize_with(names, Values::default);
        store
    }

    /// Records that a name ran. Returns true if that ends a call in flight on this thread.
    pub fn ends_call(&mut self, index: usize, names: usize) -> bool {
        if let Some(ran) = self.calls.innermost() {
            ran.insert(index);
            return ran.len() == names;
        }
        // On a worker thread of the forward: the name counts for its call but ends nothing.
        if let Some(ran) = self.calls.only() {
            ran.insert(index);
        }
        false
    }

    /// Counts `more` bytes in place of `freed` ones, if that stays within the store's budget and
    /// the one that it shares.
    pub fn afford(
        &mut self,
        more: usize,
        freed: usize,
        budget: Option<usize>,
        shared: Option<&Budget>,
    ) -> Result<(), OverBudget> {
        let held = self.bytes - freed + more;
        if let Some(most) = budget.filter(|most| held > *most) {
            return Err(OverBudget(most));
        }
        shared.map_or(Ok(()), |shared| shared.replace(more, freed))?;
        self.bytes = held;
        Ok(())
    }
}

/// Error: a value would exceed a budget of this many bytes.
pub struct OverBudget(pub usize);

/// Budget of the bytes of several stores.
pub struct Budget {
    most: usize,
    held: AtomicUsize,
}

impl Budget {
    pub fn new(most: usize) -> Self {
        Self {
            most,
            held: AtomicUsize::default(),
        }
    }

    /// Counts `more` bytes in place of `freed` ones, if that stays within the budget.
    pub fn replace(&self, more: usize, freed: usize) -> Result<(), OverBudget> {
        let replaced = |held: usize| Some(held - freed + more).filter(|held| *held <= self.most);
        // Relaxed: a sum that orders nothing.
        let done = self
            .held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, replaced);
        done.map(drop).map_err(|_| OverBudget(self.most))
    }
}
