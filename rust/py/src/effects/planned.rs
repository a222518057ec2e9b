//! Native hooks on the model of a prepared plan.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpython::invoke;
use crate::error::hook_error;
use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::rows::calls::merging::{InBatch, in_batch};
use crate::rows::membership::Membership;
use crate::rows::tracker::TokenTracker;
use crate::torch::tree::ModuleTree;

/// Hook on the model of a prepared plan, which refuses one whose modules were replaced, and on modules
/// that take tokens, which has the positions of these found.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct PlanGuard {
    /// None on a part of the model, and outside of plans.
    tree: Option<Py<ModuleTree>>,
    /// Finds positions, called with (module, args, kwargs, tracker); None if none are needed.
    positions: Option<Py<PyAny>>,
    /// None in a plan, whose requests are trackers.
    tracker: Option<Py<TokenTracker>>,
}

#[pymethods]
impl PlanGuard {
    /// Makes a guard for the modules of a tree.
    #[new]
    #[pyo3(signature = (tree, positions, tracker = None))]
    fn new(
        tree: Option<Py<ModuleTree>>,
        positions: Option<Py<PyAny>>,
        tracker: Option<Py<TokenTracker>>,
    ) -> (Self, NativeHook) {
        let guard = Self {
            tree,
            positions,
            tracker,
        };
        (guard, NativeHook::of::<Self>())
    }

    /// A copy of a module shares it.
    fn __deepcopy__(slf: Py<Self>, _memo: Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.positions)?;
        visit.call(&self.tracker)
    }
}

impl Native for PlanGuard {
    fn hidden(&self) -> bool {
        true
    }

    fn phase(&self) -> Option<Phase> {
        Some(Phase::ForwardPre)
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        if let Some(tree) = &self.tree
            && !tree.get().holds(py)?
        {
            return Err(hook_error(
                py,
                "modules of the model were replaced since the plan was prepared, and the new ones \
                 do not have its hooks: prepare the plan again",
            ));
        }
        if let Some(positions) = &self.positions {
            let tracker = TokenTracker::of(py, self.tracker.as_ref(), turn.owner)?;
            let frame = tracker.as_super().get();
            if Membership::positioned(frame) {
                return Ok(None);
            }
            Membership::begin_call(frame, None);
            let kwargs = turn.kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
            let arguments = [turn.module, turn.args, &kwargs, tracker.as_any()];
            invoke::call(positions.bind(py), arguments)?;
        }
        Ok(None)
    }

    // Dynamo guards the modules itself.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        let positions = self.positions.as_ref();
        Ok(positions.map(|_| Traced::breaking(object.clone())))
    }
}

/// Hook that ends the call which a guard with positions began.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct EndOfCall {
    /// Takes note of the call, called with (tokens, output).
    note: Py<PyAny>,
    /// None in a plan, whose requests are trackers.
    tracker: Option<Py<TokenTracker>>,
}

#[pymethods]
impl EndOfCall {
    #[new]
    #[pyo3(signature = (note, tracker = None))]
    fn new(note: Py<PyAny>, tracker: Option<Py<TokenTracker>>) -> (Self, NativeHook) {
        (Self { note, tracker }, NativeHook::of::<Self>())
    }

    /// A copy of a module shares it.
    fn __deepcopy__(slf: Py<Self>, _memo: Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.note)?;
        visit.call(&self.tracker)
    }
}

impl Native for EndOfCall {
    fn last(&self) -> bool {
        self.tracker.is_none()
    }

    fn hidden(&self) -> bool {
        true
    }

    fn phase(&self) -> Option<Phase> {
        Some(Phase::Forward)
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let tracker = TokenTracker::of(py, self.tracker.as_ref(), turn.owner)?;
        let frame = tracker.as_super().get();
        if Membership::positioned(frame) {
            return Ok(None);
        }
        if let Some(tokens) = Membership::end_call(frame).and_then(|call| call.tokens) {
            invoke::call(self.note.bind(py), [tokens.bind(py), turn.value])?;
        }
        Ok(None)
    }

    // The guard has these calls run without a graph.
    fn traced<'py>(&self, _object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(None)
    }
}

impl InBatch for EndOfCall {
    fn reads(&self, _positioned: bool) -> bool {
        false
    }
}

impl InBatch for PlanGuard {
    fn reads(&self, positioned: bool) -> bool {
        self.positions.is_some() && !positioned
    }

    fn checks(&self) -> Option<usize> {
        Some(self.tree.as_ref()?.as_ptr() as usize)
    }
}
