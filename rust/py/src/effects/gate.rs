//! `GateHook`: reads a number for each token of a request, on which hooks of its plan may depend.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use ferrohook_core::Phase;

use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::rows::calls::merging::{InBatch, in_batch};
use crate::rows::matrix::CallArguments;
use crate::rows::tracker::TokenTracker;
use crate::torch;
use crate::torch::tensors::part_of;

/// Hook of a plan that gives the tokens at some positions to the plan's gate.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct GateHook {
    /// Takes the request, the vectors of the tokens and the tokens.
    read: Py<PyAny>,
    /// Index, key or attribute of the tensor that is read; None: the whole value.
    part: Option<Py<PyAny>>,
    /// Index of the positions in the plan.
    mask: usize,
}

#[pymethods]
impl GateHook {
    #[new]
    fn new(read: Py<PyAny>, part: Option<Py<PyAny>>, mask: usize) -> (Self, NativeHook) {
        (Self { read, part, mask }, NativeHook::of::<Self>())
    }

    /// A copy of a module shares it.
    fn __deepcopy__(slf: Py<Self>, _memo: Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.read)?;
        visit.call(&self.part)
    }
}

impl Native for GateHook {
    fn native_in(&self, phase: Phase) -> bool {
        matches!(phase, Phase::Forward | Phase::ForwardPre)
    }

    // The repeat of a checkpointed forward reads again, as autograd expects the same saved tensors.
    fn runs_python(&self) -> bool {
        true
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let tracker = TokenTracker::of(py, None, turn.owner)?;
        let Some(tokens) = TokenTracker::tokens_at(tracker, self.mask, turn)? else {
            return Ok(None);
        };
        let value = match &self.part {
            Some(part) => part_of(turn.value, part.bind(py))?,
            None => turn.value.clone(),
        };
        if !torch::is_tensor(&value)? {
            let expected = "a gate reads a tensor: choose one with output_index";
            return Err(turn.type_error(expected, &value));
        }
        let call = Some(CallArguments::of(turn));
        let taken = tokens.mask.take(turn.describe, &value, call)?;
        self.read
            .bind(py)
            .call1((tracker, taken, tokens.for_python(py)?))?;
        Ok(None)
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.read.bind(object.py()).clone()
    }

    // A graph does not know the positions of the calls that will run it.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced {
            faithful: false,
            ..Traced::plain(object.clone(), false)
        }))
    }
}

impl InBatch for GateHook {}
