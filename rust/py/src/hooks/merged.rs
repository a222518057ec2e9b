//! Hooks of many members of a batch that run as one.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use ferrohook_core::Entry;
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hooks::hook::Hook;
use crate::torch::rows::{Rows, Selection, Selections, TokenPositions, length};
use crate::torch::tensors::for_each_tensor;

/// Number of changes of hooks that batches depend on.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Notes a change of the hooks of a frame or of their order, once it is made.
pub fn note_change() {
    // Release pairs with the acquire below: who reads the number finds the change.
    CHANGES.fetch_add(1, Ordering::Release);
}

/// Returns the number of [changes](note_change) so far.
pub fn changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Index of positions among those of a plan, and their places among the rows of a member; None for
/// all rows.
pub type Places = Option<(usize, Vec<usize>)>;

/// Form of a hook that runs for many members of a batch at once.
pub struct Merging {
    pub hook: Py<PyAny>,
    pub at: Places,
    /// True if it may be kept for later calls: it refers to nothing that a request captured.
    pub lasts: bool,
}

/// Merged hook of one member.
pub struct Part<'a, 'py> {
    pub hook: &'a Bound<'py, PyAny>,
    /// Number of the member, and 0 or 1 more than the index of its positions.
    pub key: (usize, usize),
    /// Rows that it is for.
    pub rows: Cow<'a, Rows>,
    /// Describes hook, phase and module, for errors.
    pub describe: &'a dyn Fn() -> String,
}

/// Finds the rows of some parts together.
pub struct Select<'a>(
    /// None if the module has rows of its own.
    pub Option<&'a Selections>,
);

impl Select<'_> {
    pub fn rows(&self, parts: &[&Part<'_, '_>]) -> Arc<Selection> {
        let rows: Vec<&Rows> = parts.iter().map(|part| &*part.rows).collect();
        match self.0 {
            Some(made) => made.get(parts.iter().map(|part| part.key).collect(), &rows),
            None => Arc::new(Selection::of(&rows)),
        }
    }
}

/// Value of the whole batch that merged hooks run for. Parts are named by their numbers.
pub struct SharedValue<'a, 'py> {
    pub value: &'a Bound<'py, PyAny>,
    pub dim: usize,
    pub size: usize,
    /// True if a member may write in place.
    pub written: bool,
    /// Returns the frame of a part's member.
    pub frames: &'a dyn Fn(usize) -> Bound<'py, PyTuple>,
    /// Returns the positions of a part's tokens, if known.
    pub positions: &'a dyn Fn(usize) -> Option<TokenPositions>,
    /// Describes hook, phase and module of a part, for errors.
    pub describe: &'a dyn Fn(usize) -> String,
}

impl SharedValue<'_, '_> {
    /// True if the tensor has the rows.
    pub fn covers(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(length(tensor, self.dim)? == Some(self.size))
    }
}

/// Merged hooks of some members, for calls with the same rows.
pub trait Joint: Send + Sync {
    /// Runs them. An error of one part is that of its member; an error of all has each run alone.
    fn run<'py>(&self, shared: &SharedValue<'_, 'py>) -> PyResult<Merged<'py>>;

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError>;
}

/// Result of merged hooks.
#[derive(Default)]
pub struct Merged<'py> {
    /// Replacement of the value.
    pub value: Option<Bound<'py, PyAny>>,
    /// Parts that failed.
    pub failed: Vec<(usize, PyErr)>,
}

/// Member all of whose hooks merge with those of others: those that change, then those that keep.
pub struct Simple {
    pub number: usize,
    pub entries: Box<[Arc<Entry<Hook>>]>,
    /// Of each hook.
    pub merging: Vec<Merging>,
}

/// A hook of a member: place of the member among those whose hooks merge, and that of the hook.
pub type HookAt = (usize, usize);

/// Hooks that run as one, of a member each.
type Stage = Box<[HookAt]>;

/// Members of a batch whose hooks for a module merge.
pub struct MergedHooks {
    pub members: Vec<Simple>,
    /// True if they may be kept for later calls.
    pub last: bool,
    /// Kinds of the tensors of a value that the hooks were checked for.
    checked: OnceLock<Vec<Kind>>,
    joints: Mutex<Vec<(Stage, Arc<dyn Joint>)>>,
}

/// Dtype and device of a tensor, its number of dimensions and the last of them.
struct Kind {
    dtype: Py<PyAny>,
    device: Py<PyAny>,
    shape: (usize, Option<usize>),
}

impl MergedHooks {
    pub fn new(members: Vec<Simple>) -> Self {
        let mut merging = members.iter().flat_map(|member| &member.merging);
        Self {
            last: merging.all(|it| it.lasts && it.at.is_none()),
            members,
            checked: OnceLock::new(),
            joints: Mutex::default(),
        }
    }

    /// The members, to be run alone.
    pub fn each(&self) -> Vec<(usize, &[Arc<Entry<Hook>>])> {
        let members = self.members.iter();
        members.map(|it| (it.number, &*it.entries)).collect()
    }

    /// Finds the joint hooks of a stage, or makes them.
    pub fn joint(
        &self,
        stage: &[HookAt],
        make: impl FnOnce() -> PyResult<Box<dyn Joint>>,
    ) -> PyResult<Arc<dyn Joint>> {
        let found =
            |(of, joint): &(Stage, Arc<dyn Joint>)| (**of == *stage).then(|| Arc::clone(joint));
        if let Some(joint) = self.joints.lock().iter().find_map(found) {
            return Ok(joint);
        }
        let joint: Arc<dyn Joint> = make()?.into();
        self.joints.lock().push((stage.into(), Arc::clone(&joint)));
        Ok(joint)
    }

    /// True if the hooks were [checked](Self::check) for a value of such tensors.
    pub fn checked(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(checked) = self.checked.get() else {
            return Ok(false);
        };
        let mut known = checked.iter();
        let mut same = true;
        for_each_tensor(value, &mut |tensor| {
            same = same
                && known
                    .next()
                    .is_some_and(|it| it.is_of(tensor).unwrap_or(false));
            Ok(())
        })?;
        Ok(same && known.next().is_none())
    }

    /// Notes that the hooks were checked for a value; the first one counts.
    pub fn check(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut kinds = Vec::new();
        for_each_tensor(value, &mut |tensor| {
            kinds.push(Kind::of(tensor)?);
            Ok(())
        })?;
        let _ = self.checked.set(kinds);
        Ok(())
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for merging in self.members.iter().flat_map(|member| &member.merging) {
            visit.call(&merging.hook)?;
        }
        let joints = self.joints.lock();
        joints
            .iter()
            .try_for_each(|(_, joint)| joint.traverse(visit))
    }
}

impl Kind {
    fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        Ok(Self {
            dtype: tensor.getattr(intern!(py, "dtype"))?.unbind(),
            device: tensor.getattr(intern!(py, "device"))?.unbind(),
            shape: Self::shape(tensor)?,
        })
    }

    fn is_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        Ok(self.shape == Self::shape(tensor)?
            && self.dtype.is(&tensor.getattr(intern!(py, "dtype"))?)
            && tensor.getattr(intern!(py, "device"))?.eq(&self.device)?)
    }

    fn shape(tensor: &Bound<'_, PyAny>) -> PyResult<(usize, Option<usize>)> {
        let shape = tensor.getattr(intern!(tensor.py(), "shape"))?;
        let shape = shape.cast_into::<PyTuple>()?;
        let last = shape.iter_borrowed().last();
        Ok((
            shape.len(),
            last.as_deref().map(PyAnyMethods::extract).transpose()?,
        ))
    }
}
