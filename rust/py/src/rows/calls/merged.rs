//! Members of a batch whose hooks for a module merge.

use std::any::TypeId;
use std::sync::{Arc, OnceLock};

use ferrohook_core::Entry;
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hooks::hook::Hook;
use crate::rows::calls::merging::{Joint, Merging};
use crate::torch::tensors::tensors_of;

/// Member all of whose hooks merge with other members': interventions first, then captures.
pub struct Simple {
    pub number: usize,
    pub entries: Box<[Arc<Entry<Hook>>]>,
    /// Of each hook.
    pub merging: Vec<Merging>,
    /// Of each hook.
    pub kinds: Vec<StageKind>,
}

/// Stage: kind of hooks that run as one. True for captures, which run last, and the hooks' class.
pub type StageKind = (bool, TypeId);

/// A hook of a member: index of the member in the merged members, and index of the hook.
pub type HookAt = (usize, usize);

/// Hooks that run as one, of a member each.
type Stage = Box<[HookAt]>;

/// Members of a batch whose hooks for a module merge.
pub struct MergedHooks {
    pub members: Vec<Simple>,
    /// True if they may be kept for later calls.
    pub last: bool,
    /// Kinds of the tensors of a value that the hooks were checked for.
    checked: OnceLock<Vec<TensorKind>>,
    joints: Mutex<Vec<(Stage, Arc<dyn Joint>)>>,
}

/// Dtype and device of a tensor, its number of dimensions and the last of them.
struct TensorKind {
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
        let tensors = tensors_of(value)?;
        let mut pairs = checked.iter().zip(&tensors);
        let alike = pairs.all(|(kind, tensor)| kind.is_of(tensor).unwrap_or(false));
        Ok(alike && checked.len() == tensors.len())
    }

    /// Notes that the hooks were checked for a value; the first one counts.
    pub fn check(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let kinds = tensors_of(value)?;
        let kinds = kinds.iter().map(TensorKind::of).collect::<PyResult<_>>()?;
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
