//! `RouteHook`: changes the output of a module at chosen tokens, whose positions it knows.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::rows::at::Chosen;
use crate::rows::calls::merging::{InBatch, in_batch};
use crate::rows::matrix::CallArguments;
use crate::rows::places::Tokens;
use crate::rows::tracker::TokenTracker;
use crate::torch;
use crate::torch::tensors::part_of;

/// Hook that has the tokens at some positions take other experts.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct RouteHook {
    /// Takes the output, the places of the tokens in it and the tokens; returns another output or None.
    change: Py<PyAny>,
    /// Part of the output with a row for each token.
    part: Py<PyAny>,
    /// Index of the positions in the plan or the tracker.
    mask: usize,
    /// None in a plan, whose requests are trackers.
    tracker: Option<Py<TokenTracker>>,
}

#[pymethods]
impl RouteHook {
    #[new]
    #[pyo3(signature = (change, part, mask, tracker = None))]
    fn new(
        change: Py<PyAny>,
        part: Py<PyAny>,
        mask: usize,
        tracker: Option<Py<TokenTracker>>,
    ) -> (Self, NativeHook) {
        let hook = Self {
            change,
            part,
            mask,
            tracker,
        };
        (hook, NativeHook::of::<Self>())
    }

    /// A copy of a module shares it.
    fn __deepcopy__(slf: Py<Self>, _memo: Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.change)?;
        visit.call(&self.part)?;
        visit.call(&self.tracker)
    }
}

impl Native for RouteHook {
    fn phase(&self) -> Option<Phase> {
        Some(Phase::Forward)
    }

    fn changes(&self) -> bool {
        true
    }

    fn runs_python(&self) -> bool {
        true
    }

    fn state_of<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        Some(self.tracker.as_ref()?.bind(py).clone().into_any())
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let tracker = TokenTracker::of(py, self.tracker.as_ref(), turn.owner)?;
        let tokens = Tokens::of(turn);
        let own = tokens.and_then(|it| it.own.as_ref());
        let Chosen::At(mask) = TokenTracker::chosen(tracker, self.mask, own)? else {
            return Ok(None);
        };
        let tokens = TokenTracker::tokens_at(tracker, self.mask, tokens, turn.describe)?;
        let Some(tokens) = tokens else {
            return Ok(None);
        };
        let rows = part_of(turn.value, self.part.bind(py))?;
        if !torch::is_tensor(&rows)? {
            return Err(turn.type_error("a router returns the ids of experts", &rows));
        }
        let call = Some(CallArguments::of(turn));
        let places = mask.places_in(turn.describe, &rows, call)?;
        let arguments = (turn.value, places, tokens.for_python(py)?);
        let changed = self.change.bind(py).call1(arguments)?;
        Ok((!changed.is_none()).then_some(changed))
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.change.bind(object.py()).clone()
    }

    // A graph does not know the positions of the calls that will run it.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced {
            faithful: false,
            ..Traced::plain(object.clone(), false)
        }))
    }
}

// Each member has its ids.
impl InBatch for RouteHook {}
