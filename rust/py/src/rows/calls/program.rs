//! Program of a batch's members at a module: their hooks, joined stage by stage.

use std::any::TypeId;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use ferrohook_core::Entry;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hooks::hook::Hook;
use crate::rows::calls::merging::{Joints, Merging};
use crate::torch::tensors::tensors_of;

/// Hooks of a member in firing order.
type Entries = Box<[Arc<Entry<Hook>>]>;

/// Kind of a stage. True for captures, which run last, and the hooks' class.
pub type StageKind = (bool, TypeId);

/// Member all of whose hooks merge with other members': interventions first, then captures.
pub struct MergingMember {
    pub number: usize,
    pub entries: Entries,
    /// The same hooks, with the kinds of their stages.
    pub hooks: VecDeque<(StageKind, StageHook)>,
}

/// Hooks of a batch's members for a module that run as one, stage by stage.
pub struct Program {
    /// Number and hooks of each member.
    pub members: Vec<(usize, Entries)>,
    /// The same hooks, in the order in which they run.
    pub stages: Vec<Stage>,
    /// True if later calls may use it.
    pub cacheable: bool,
    /// Kinds of the tensors of a value that it was checked for.
    checked: OnceLock<Vec<TensorKind>>,
}

/// Hooks of one kind that run as one, of a member each.
pub struct Stage {
    pub hooks: Vec<StageHook>,
    /// All of them, joined.
    joint: OnceLock<Arc<Joints>>,
}

/// A hook in a stage.
pub struct StageHook {
    /// Number of the member.
    pub member: usize,
    pub entry: Arc<Entry<Hook>>,
    pub merging: Merging,
}

/// Dtype and device of a tensor, its number of dimensions and the last of them.
struct TensorKind {
    dtype: Py<PyAny>,
    device: Py<PyAny>,
    shape: (usize, Option<usize>),
}

impl Program {
    pub fn new(members: Vec<MergingMember>) -> Self {
        let (mut all, mut pending) = (Vec::new(), Vec::new());
        for member in members {
            pending.push(member.hooks);
            all.push((member.number, member.entries));
        }
        let mut stages = Vec::new();
        // Next all pending hooks of one class, interventions before captures.
        while let Some(next) = pending.iter().filter_map(|it| Some(it.front()?.0)).min() {
            let hooks = pending.iter_mut().filter_map(|it| {
                let (kind, _) = it.front()?;
                if *kind == next { it.pop_front() } else { None }
            });
            stages.push(Stage {
                hooks: hooks.map(|(_, hook)| hook).collect(),
                joint: OnceLock::new(),
            });
        }
        let mut hooks = stages.iter().flat_map(|stage| &stage.hooks);
        Self {
            cacheable: hooks.all(|it| it.merging.lasts && it.merging.at.is_none()),
            members: all,
            stages,
            checked: OnceLock::new(),
        }
    }

    /// The members, to be run separately.
    pub fn each(&self) -> Vec<(usize, &[Arc<Entry<Hook>>])> {
        let members = self.members.iter();
        members
            .map(|(number, entries)| (*number, &**entries))
            .collect()
    }

    /// True if it was [checked](Self::check) for a value of such tensors.
    pub fn checked(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(checked) = self.checked.get() else {
            return Ok(false);
        };
        let tensors = tensors_of(value)?;
        let mut pairs = checked.iter().zip(&tensors);
        let alike = pairs.all(|(kind, tensor)| kind.is_of(tensor).unwrap_or(false));
        Ok(alike && checked.len() == tensors.len())
    }

    /// Notes that it was checked for a value; the first one counts.
    pub fn check(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let kinds = tensors_of(value)?;
        let kinds = kinds.iter().map(TensorKind::of).collect::<PyResult<_>>()?;
        let _ = self.checked.set(kinds);
        Ok(())
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for stage in &self.stages {
            for hook in &stage.hooks {
                visit.call(&hook.merging.hook)?;
            }
            let mut joint = stage.joint.get().into_iter().flat_map(|it| it.iter());
            joint.try_for_each(|it| it.traverse(visit))?;
        }
        Ok(())
    }
}

impl Stage {
    /// Returns all of its hooks joined, by `make` the first time.
    pub fn joint(&self, make: impl FnOnce() -> PyResult<Arc<Joints>>) -> PyResult<Arc<Joints>> {
        if let Some(joint) = self.joint.get() {
            return Ok(Arc::clone(joint));
        }
        let joint = make()?;
        Ok(Arc::clone(self.joint.get_or_init(|| joint)))
    }
}

impl TensorKind {
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
