//! `TokenHook`: reads or changes a value at chosen tokens, whose positions it knows.

use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Turn};
use crate::rows::call_tokens::CallTokens;
use crate::rows::calls::merging::{InBatch, in_batch};
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::rows::places::Tokens;
use crate::rows::tracker::TokenTracker;
use crate::torch;
use crate::torch::tensors::part_of;

/// Tokens of a call that a hook acts on.
pub struct ActingTokens<'a, 'py> {
    /// The request, or the tracker outside of plans.
    pub tracker: &'a Bound<'py, TokenTracker>,
    pub mask: Arc<Mask>,
    pub tokens: CallTokens,
}

impl<'a, 'py> ActingTokens<'a, 'py> {
    /// Finds those at one of the positions, by its index; None if there are none.
    pub fn of(
        turn: &'a Turn<'_, 'py>,
        tracker: Option<&'a Py<TokenTracker>>,
        at: usize,
    ) -> PyResult<Option<Self>> {
        let py = turn.module.py();
        let tracker = TokenTracker::of(py, tracker, turn.owner)?;
        let tokens = Tokens::of(turn);
        let own = tokens.and_then(|it| it.own.as_ref());
        let Some(mask) = TokenTracker::chosen(tracker, at, own)? else {
            return Ok(None);
        };
        let found = TokenTracker::tokens_at(tracker, at, tokens, turn.describe)?;
        Ok(found.map(|found| Self {
            tracker,
            mask,
            tokens: found.tokens,
        }))
    }
}

/// Hook on the tokens at some positions, such as a route.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct TokenHook {
    /// Takes the request or tracker, the value, the places of the tokens in the part and the tokens;
    /// returns another value or None.
    change: Py<PyAny>,
    /// Part of the value with the tokens; None: the whole value.
    part: Option<Py<PyAny>>,
    /// Index of the positions in the plan or the tracker.
    mask: usize,
    /// None in a plan, whose requests are trackers.
    tracker: Option<Py<TokenTracker>>,
}

#[pymethods]
impl TokenHook {
    #[new]
    #[pyo3(signature = (change, part, mask, tracker = None))]
    fn new(
        change: Py<PyAny>,
        part: Option<Py<PyAny>>,
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

impl Native for TokenHook {
    fn native_in(&self, phase: Phase) -> bool {
        matches!(phase, Phase::Forward | Phase::ForwardPre)
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
        let Some(tokens) = ActingTokens::of(turn, self.tracker.as_ref(), self.mask)? else {
            return Ok(None);
        };
        let rows = match &self.part {
            Some(part) => part_of(turn.value, part.bind(py))?,
            None => turn.value.clone(),
        };
        if !torch::is_tensor(&rows)? {
            return Err(turn.type_error("it acts on a tensor", &rows));
        }
        let call = Some(CallArguments::of(turn));
        let places = tokens.mask.places_in(turn.describe, &rows, call)?;
        let arguments = (tokens.tracker, turn.value, places, tokens.tokens);
        let changed = self.change.bind(py).call1(arguments)?;
        Ok((!changed.is_none()).then_some(changed))
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.change.bind(object.py()).clone()
    }
}

// Each member runs separately.
impl InBatch for TokenHook {}
