//! `GateHook`: reads a number for each token of a request, on which hooks of its plan may depend.

use std::sync::{Arc, OnceLock};

use ferrohook_core::Phase;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;

use crate::effects::tokens::ActingTokens;
use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Turn};
use crate::rows::calls::joined_tokens::{JoinedTokens, TokenPart, positioned};
use crate::rows::calls::merging::{
    InBatch, Joint, Joints, MergedPart, MergedResult, Merging, Select, SharedValue, groups,
    in_batch, same_part, whole_part_of,
};
use crate::rows::matrix::CallArguments;
use crate::rows::numbers::Selection;
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
        let Some(tokens) = ActingTokens::of(turn, None, self.mask)? else {
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
        let read = self.read.bind(py);
        read.call1((tokens.tracker, taken, tokens.tokens))?;
        Ok(None)
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.read.bind(object.py()).clone()
    }
}

impl InBatch for GateHook {
    fn merges<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        _phase: Phase,
        owner: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Merging>> {
        Ok(positioned(owner)?.then(|| Merging {
            hook: object.clone().unbind(),
            at: None,
            lasts: true,
        }))
    }

    fn join(&self, parts: &[MergedPart<'_, '_>], select: &Select<'_>) -> PyResult<Joints> {
        let groups = groups::<Self>(parts, |first, second| {
            let parts = [first, second].map(|it| it.get().part.as_ref());
            same_part(first.py(), parts[0], parts[1])
        })?;
        let groups = groups.into_iter().map(|group| {
            let mut hooks = Vec::new();
            let mut tokens = Vec::new();
            for number in &group {
                let part = &parts[*number];
                let hook = part.hook.cast::<Self>()?;
                tokens.push(TokenPart {
                    number: *number,
                    rows: part.rows.len(),
                    at: Some(hook.get().mask),
                });
                hooks.push(hook.clone().unbind());
            }
            Ok(Box::new(GateGroup {
                hooks,
                parts: tokens,
                selection: select.rows(parts, &group),
                joined: OnceLock::new(),
            }) as Box<dyn Joint>)
        });
        groups.collect()
    }
}

/// Gates of some members, of the same part of a value.
struct GateGroup {
    hooks: Vec<Py<GateHook>>,
    parts: Vec<TokenPart>,
    selection: Arc<Selection>,
    /// Python's reader for all of them.
    joined: OnceLock<Py<PyAny>>,
}

impl GateGroup {
    /// Returns the reader of the gates of some of the parts.
    fn reader<'py>(&self, py: Python<'py>, parts: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let all = parts.len() == self.hooks.len();
        if all && let Some(joined) = self.joined.get() {
            return Ok(joined.bind(py).clone());
        }
        let readers = parts
            .iter()
            .map(|place| self.hooks[*place].get().read.bind(py));
        let readers: Vec<_> = readers.collect();
        let joined = readers[0].call_method1(intern!(py, "joined"), (&readers,))?;
        if all {
            let _ = self.joined.set(joined.clone().unbind());
        }
        Ok(joined)
    }
}

impl Joint for GateGroup {
    /// Makes the gates read their rows.
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()> {
        let failed = &mut merged.failed;
        let py = shared.value.py();
        let part = self.hooks[0].get().part.as_ref();
        let x = match part {
            Some(part) => whole_part_of(shared.value, part.bind(py))?,
            None => shared.value.clone(),
        };
        if !torch::is_tensor(&x)? || !shared.layout.covers(&x)? {
            return Err(PyTypeError::new_err("a gate reads a tensor with the rows"));
        }
        let tokens = JoinedTokens::of(shared, &self.parts, failed)?;
        if tokens.parts.is_empty() {
            return Ok(());
        }
        let vectors = tokens.take(&x, &self.selection, shared.layout.size)?;
        let places: Vec<_> = tokens.parts.iter().map(|(place, ..)| *place).collect();
        let reader = self.reader(py, &places)?;
        let given = tokens
            .parts
            .iter()
            .map(|(_, owner, own)| (owner, own.clone()));
        let given: Vec<_> = given.collect();
        let errors: Vec<Option<Bound<'_, PyAny>>> = reader.call1((vectors, given))?.extract()?;
        let errors = errors.into_iter().map(|error| error.map(PyErr::from_value));
        failed.extend(tokens.failures(&self.parts, errors));
        Ok(())
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self.joined.get())?;
        self.hooks.iter().try_for_each(|hook| visit.call(hook))
    }
}
