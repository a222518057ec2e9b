//! Native hooks of prepared plans: hooks at chosen positions, and the guard of the model.

use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cpython::invoke;
use crate::effects::intervention::{InterventionBase, Strength};
use crate::error::hook_error;
use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::rows::at::Chosen;
use crate::rows::calls::merging::{InBatch, Merging, in_batch};
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::rows::membership::Membership;
use crate::rows::places::Tokens;
use crate::rows::tracker::TokenTracker;
use crate::torch;
use crate::torch::tree::ModuleTree;

/// Hook at some positions, under a condition or with a strength: an intervention, or a forward hook of
/// PyTorch's contract, whose result replaces the output there.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct MaskedHook {
    hook: Py<PyAny>,
    /// True for an intervention.
    intervenes: bool,
    /// Index of the positions in the plan or the tracker; None for all tokens, wherever they are.
    mask: Option<usize>,
    /// None in a plan, whose requests are trackers.
    tracker: Option<Py<TokenTracker>>,
    /// Chooses among the tokens at the positions: called with the request and the tokens, it returns
    /// which of them the hook changes and with what strength, None for all the way; or None for no token.
    condition: Option<Py<PyAny>>,
    /// Strength without a condition.
    strength: Option<Py<PyAny>>,
}

#[pymethods]
impl MaskedHook {
    #[new]
    #[pyo3(signature = (hook, mask, tracker = None, *, condition = None, strength = None))]
    fn new(
        hook: Bound<'_, PyAny>,
        mask: Option<usize>,
        tracker: Option<Py<TokenTracker>>,
        condition: Option<Py<PyAny>>,
        strength: Option<Py<PyAny>>,
    ) -> (Self, NativeHook) {
        let masked = Self {
            intervenes: hook.is_instance_of::<InterventionBase>(),
            hook: hook.unbind(),
            mask,
            tracker,
            condition,
            strength,
        };
        (masked, NativeHook::of::<Self>())
    }

    /// The hook that the user registered.
    #[getter]
    fn hook(&self, py: Python<'_>) -> Py<PyAny> {
        self.hook.clone_ref(py)
    }

    /// A copy of a module shares it.
    fn __deepcopy__(slf: Py<Self>, _memo: Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.hook)?;
        visit.call(&self.tracker)?;
        visit.call(&self.condition)?;
        visit.call(&self.strength)
    }
}

/// Where a hook changes a value, and how much.
struct Extent<'a, 'py> {
    /// None: everywhere.
    mask: Option<Arc<Mask>>,
    strength: Option<Strength<'a, 'py>>,
}

impl MaskedHook {
    /// Returns where it changes the value of a turn; None if nowhere.
    fn extent<'a, 'py>(&self, turn: &'a Turn<'_, 'py>) -> PyResult<Option<Extent<'a, 'py>>> {
        let py = turn.module.py();
        let number = self.strength.as_ref();
        let strength = number.map(|it| Strength::Number(it.bind(py).clone()));
        let Some(at) = self.mask else {
            let mask = None;
            return Ok(Some(Extent { mask, strength }));
        };
        let tracker = TokenTracker::of(py, self.tracker.as_ref(), turn.owner)?;
        let Some(condition) = &self.condition else {
            let own = Tokens::of(turn).and_then(|it| it.own.as_ref());
            return Ok(match TokenTracker::chosen(tracker, at, own)? {
                Chosen::Nothing => None,
                Chosen::At(mask) => Some(Extent {
                    mask: Some(mask),
                    strength,
                }),
            });
        };
        let Some(tokens) = TokenTracker::tokens_at(tracker, at, turn)? else {
            return Ok(None);
        };
        let arguments = (tracker, tokens.for_python(py)?);
        let chosen = condition.bind(py).call1(arguments)?;
        let chosen: Option<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> = chosen.extract()?;
        let Some((acts, strengths)) = chosen else {
            return Ok(None);
        };
        let Some(mask) = tokens.mask.refined(&acts)? else {
            return Ok(None);
        };
        let of_tokens = |numbers| Strength::OfTokens(tokens.mask, numbers, CallArguments::of(turn));
        Ok(Some(Extent {
            mask: Some(Arc::new(mask)),
            strength: strengths.map(of_tokens).or(strength),
        }))
    }
}

impl Native for MaskedHook {
    fn native_in(&self, phase: Phase) -> bool {
        phase == Phase::Forward || (phase == Phase::ForwardPre && self.intervenes)
    }

    fn changes(&self) -> bool {
        true
    }

    fn runs_python(&self) -> bool {
        !self.intervenes
    }

    fn state_of<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        Some(self.tracker.as_ref()?.bind(py).clone().into_any())
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let Some(Extent { mask, strength }) = self.extent(turn)? else {
            return Ok(None);
        };
        let (mask, strength) = (mask.as_deref(), strength.as_ref());
        let hook = self.hook.bind(py);
        if let Ok(intervention) = hook.cast::<InterventionBase>() {
            return InterventionBase::run_masked(intervention, turn, mask, strength);
        }
        let mut result = invoke::call(hook, [turn.module, turn.args.as_any(), turn.value])?;
        if result.is_none() {
            return Ok(None);
        }
        if !(torch::is_tensor(turn.value)? && torch::is_tensor(&result)?) {
            return Err(turn.type_error(
                "with at=, when= or strength=, it must return a tensor",
                &result,
            ));
        }
        if let Some(strength) = strength {
            result = strength.blend(turn.describe, &result, turn.value)?;
        }
        let Some(mask) = mask else {
            return Ok(Some(result));
        };
        let call = Some(CallArguments::of(turn));
        mask.merge(turn.describe, &result, turn.value, call)
            .map(Some)
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.hook.bind(object.py()).clone()
    }

    // A graph does not know the positions of the calls that will run it.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced {
            faithful: false,
            ..Traced::plain(object.clone(), false)
        }))
    }
}

impl InBatch for MaskedHook {
    fn merges<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        phase: Phase,
        owner: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Merging>> {
        let py = object.py();
        let (Some(at), None, None) = (self.mask, &self.condition, &self.strength) else {
            return Ok(None);
        };
        let Ok(intervention) = self.hook.bind(py).cast::<InterventionBase>() else {
            return Ok(None);
        };
        let Some(merging) = intervention.get().merges(intervention, phase, owner)? else {
            return Ok(None);
        };
        let tracker = TokenTracker::of(py, self.tracker.as_ref(), Some(owner))?;
        let places = TokenTracker::places(tracker, at);
        Ok(places.map(|places| Merging {
            at: Some((at, places)),
            ..merging
        }))
    }
}

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
        Ok(positions.map(|_| Traced {
            faithful: false,
            ..Traced::plain(object.clone(), false)
        }))
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
