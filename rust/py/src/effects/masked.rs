//! `MaskedHook`: a hook at chosen positions, under a condition or with a strength.

use std::borrow::Cow;
use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;

use crate::cpython::invoke;
use crate::effects::intervention::{Extent, InterventionBase, Strength, lerp};
use crate::effects::together::InterventionGroup;
use crate::gates::conditions::{Strengths, TokenChoice};
use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Turn};
use crate::rows::calls::joined_tokens::{JoinedTokens, TokenPart, positioned};
use crate::rows::calls::merging::{
    InBatch, Joint, Joints, MergedPart, MergedResult, Merging, Select, SharedValue, in_batch,
};
use crate::rows::matrix::CallArguments;
use crate::rows::places::Tokens;
use crate::rows::tracker::TokenTracker;
use crate::torch;
use crate::torch::tensors::{host_tensor, version_if_any};

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
    /// Chooses among the tokens at the positions.
    condition: Option<Py<TokenChoice>>,
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
        condition: Option<Py<TokenChoice>>,
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

impl MaskedHook {
    /// Returns where it changes the value of a turn; None if nowhere.
    fn extent<'py>(&self, turn: &Turn<'_, 'py>) -> PyResult<Option<Extent<'py>>> {
        let py = turn.module.py();
        let number = self.strength.as_ref();
        let strength = number.map(|it| Strength::Number(it.bind(py).clone()));
        let Some(at) = self.mask else {
            let mask = None;
            return Ok(Some(Extent { mask, strength }));
        };
        let tracker = TokenTracker::of(py, self.tracker.as_ref(), turn.owner)?;
        let tokens = Tokens::of(turn);
        let own = tokens.and_then(|it| it.own.as_ref());
        let Some(mask) = TokenTracker::chosen(tracker, at, own)? else {
            return Ok(None);
        };
        let Some(condition) = &self.condition else {
            let mask = Some(mask);
            return Ok(Some(Extent { mask, strength }));
        };
        let Some(found) = TokenTracker::tokens_at(tracker, at, tokens, turn.describe)? else {
            return Ok(None);
        };
        let (acts, strengths) = condition.get().decide(tracker, &found.tokens)?;
        if !acts.contains(&true) {
            return Ok(None);
        }
        let refined = if acts.contains(&false) {
            Arc::new(mask.refined(py, acts)?)
        } else {
            Arc::clone(&mask)
        };
        let of_tokens = |numbers| Strength::OfTokens(mask, numbers);
        Ok(Some(Extent {
            mask: Some(refined),
            strength: strengths.tensor(py)?.map(of_tokens).or(strength),
        }))
    }
}

impl Native for MaskedHook {
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
        let Some(extent) = self.extent(turn)? else {
            return Ok(None);
        };
        let hook = self.hook.bind(py);
        if let Ok(intervention) = hook.cast::<InterventionBase>() {
            return InterventionBase::run_in(intervention, turn, Some(&extent));
        }
        let is_tensor = torch::is_tensor(turn.value)?;
        let (mut own, mut before) = (turn.value.clone(), None);
        if is_tensor {
            own = own.call_method0(intern!(py, "clone"))?; // it may write to it
            before = version_if_any(&own)?;
        }
        let mut result = invoke::call(hook, [turn.module, turn.args.as_any(), &own])?;
        if result.is_none() {
            if !is_tensor || (before.is_some() && version_if_any(&own)? == before) {
                return Ok(None);
            }
            result = own;
        }
        if !(is_tensor && torch::is_tensor(&result)?) {
            return Err(turn.type_error(
                "with at=, when= or strength=, it must return a tensor",
                &result,
            ));
        }
        let call = CallArguments::of(turn);
        extent.of(turn.describe, result, turn.value, call).map(Some)
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.hook.bind(object.py()).clone()
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
        let Ok(intervention) = self.hook.bind(py).cast::<InterventionBase>() else {
            return Ok(None);
        };
        let Some(merging) = intervention.get().merges(intervention, phase, owner)? else {
            return Ok(None);
        };
        let plain = self.condition.is_none() && self.strength.is_none();
        if let Some(at) = self.mask.filter(|_| plain) {
            let tracker = TokenTracker::of(py, self.tracker.as_ref(), Some(owner))?;
            if let Some(places) = TokenTracker::places(tracker, at) {
                let at = Some((at, places));
                return Ok(Some(Merging { at, ..merging }));
            }
        }
        let whole = self.mask.is_none() && self.condition.is_none();
        let merges = whole || (self.tracker.is_none() && positioned(owner)?);
        Ok(merges.then(|| Merging {
            hook: object.clone().unbind(),
            ..merging
        }))
    }

    // Nothing is checked ahead: a hook fails its member only where it acts.

    fn join(&self, parts: &[MergedPart<'_, '_>], select: &Select<'_>) -> PyResult<Joints> {
        let inner = interventions(parts)?;
        let groups = InterventionGroup::all(&as_parts(parts, &inner), select)?.into_iter();
        let groups =
            groups.map(|it| Ok(Box::new(ConditionalGroup::of(parts, it)?) as Box<dyn Joint>));
        groups.collect()
    }
}

/// Interventions of merged hooks.
fn interventions<'py>(parts: &[MergedPart<'_, 'py>]) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let hooks = parts.iter().map(|part| {
        let masked = part.hook.cast::<MaskedHook>()?;
        Ok(masked.get().hook.bind(masked.py()).clone())
    });
    hooks.collect()
}

/// The same parts with other hooks.
fn as_parts<'a, 'py>(
    parts: &'a [MergedPart<'a, 'py>],
    hooks: &'a [Bound<'py, PyAny>],
) -> Vec<MergedPart<'a, 'py>> {
    let pairs = parts.iter().zip(hooks);
    pairs
        .map(|(part, hook)| MergedPart {
            hook,
            rows: Cow::Borrowed(&*part.rows),
            ..*part
        })
        .collect()
}

/// Interventions of some members, of one kind, under conditions or with strengths.
struct ConditionalGroup {
    interventions: InterventionGroup,
    hooks: Vec<Py<MaskedHook>>,
    parts: Vec<TokenPart>,
}

impl ConditionalGroup {
    fn of(parts: &[MergedPart<'_, '_>], interventions: InterventionGroup) -> PyResult<Self> {
        let mut hooks = Vec::new();
        let mut tokens = Vec::new();
        for number in &interventions.parts {
            let hook = parts[*number].hook.cast::<MaskedHook>()?;
            tokens.push(TokenPart {
                number: *number,
                rows: parts[*number].rows.len(),
                at: hook.get().mask,
            });
            hooks.push(hook.clone().unbind());
        }
        Ok(Self {
            interventions,
            hooks,
            parts: tokens,
        })
    }

    /// Returns where the hooks act, and how much; None if nowhere. `failed` takes the errors of parts.
    fn decide<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        failed: &mut Vec<(usize, PyErr)>,
    ) -> PyResult<Option<Blend<'py>>> {
        let py = shared.value.py();
        let tokens = JoinedTokens::of(shared, &self.parts, failed)?;
        let mut acts = Vec::with_capacity(tokens.len());
        let mut strengths = StrengthsOfParts::default();
        let mut errors = Vec::with_capacity(tokens.parts.len());
        for (place, owner, own) in &tokens.parts {
            let hook = self.hooks[*place].get();
            let decided = match &hook.condition {
                None => Ok((vec![true; own.len()], Strengths::Constant)),
                Some(condition) => condition.get().decide(owner, own),
            };
            let (chosen, found, error) = match decided {
                Ok((chosen, found)) => (chosen, found, None),
                Err(error) => (vec![false; own.len()], Strengths::Constant, Some(error)),
            };
            acts.extend(chosen);
            errors.push(error);
            strengths.add(py, own.len(), found, hook.strength.as_ref())?;
        }
        failed.extend(tokens.failures(&self.parts, errors));
        let strengths = strengths.joined(py)?;
        if !acts.contains(&true) {
            return Ok(None);
        }
        if torch::is_grad_enabled(py)? && tokens.has_idle(&self.parts, &acts) {
            // Its gradient would pass through a change that is not made, whose own may be NaN.
            let message = "each member runs alone where one is not changed and a graph is recorded";
            return Err(PyTypeError::new_err(message));
        }
        let all = acts.len() == tokens.count && !acts.contains(&false);
        Ok(Some(Blend {
            acts: (!all).then_some(acts),
            strengths,
            tokens,
        }))
    }
}

impl Joint for ConditionalGroup {
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()> {
        if let Some(blend) = self.decide(shared, &mut merged.failed)? {
            let now = merged.now(shared);
            let blend = |changed: &_, x: &_| blend.of(changed, x);
            merged.value = Some(self.interventions.apply(shared, now, Some(&blend))?);
        }
        Ok(())
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.interventions.traverse(visit)?;
        self.hooks.iter().try_for_each(|hook| visit.call(hook))
    }
}

/// Share of a change that is made, token by token.
struct Blend<'py> {
    tokens: JoinedTokens<'py>,
    /// True for tokens that are changed; None: all are.
    acts: Option<Vec<bool>>,
    /// Tensor with the strength of each token; None: all the way.
    strengths: Option<Bound<'py, PyAny>>,
}

impl<'py> Blend<'py> {
    fn of(
        &self,
        changed: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let mut blended = changed.clone();
        if let Some(strengths) = &self.strengths {
            blended = lerp(&blended, x, self.tokens.spread(strengths, x)?)?;
        }
        if let Some(acts) = &self.acts {
            let acts = self.tokens.mask(acts, x)?;
            blended = blended.call_method1(intern!(py, "where"), (acts, x))?;
        }
        Ok(blended)
    }
}

/// Strengths at the tokens of several parts, one part after the other.
#[derive(Default)]
struct StrengthsOfParts<'py> {
    parts: Vec<Strengths<'py>>,
    /// True if one may differ from 1.
    partial: bool,
}

impl<'py> StrengthsOfParts<'py> {
    /// Adds the strengths of a part; `constant`: strength of its hook, if it follows no gate.
    fn add(
        &mut self,
        py: Python<'py>,
        count: usize,
        found: Strengths<'py>,
        constant: Option<&Py<PyAny>>,
    ) -> PyResult<()> {
        self.partial |= constant.is_some() || !matches!(found, Strengths::Constant);
        self.parts.push(match found {
            Strengths::Constant => {
                let constant = constant.map_or(Ok(1.0), |it| it.extract(py))?;
                Strengths::Numbers(vec![constant; count])
            }
            found => found,
        });
        Ok(())
    }

    /// Returns them as a tensor; None if all are 1.
    fn joined(self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.partial {
            return Ok(None);
        }
        let recorded = self.parts.iter().find_map(|part| match part {
            Strengths::Recorded(tensor) => Some(tensor.clone()),
            _ => None,
        });
        let Some(recorded) = recorded else {
            let numbers = self.parts.into_iter().flat_map(|part| match part {
                Strengths::Numbers(numbers) => numbers,
                _ => Vec::new(),
            });
            return host_tensor(py, numbers.collect::<Vec<_>>(), "float32").map(Some);
        };
        let device = recorded.getattr(intern!(py, "device"))?;
        let mut tensors = Vec::with_capacity(self.parts.len());
        for part in self.parts {
            if let Some(tensor) = part.tensor(py)? {
                tensors.push(tensor.call_method1(intern!(py, "to"), (&device,))?);
            }
        }
        let torch = py.import(intern!(py, "torch"))?;
        torch.call_method1(intern!(py, "cat"), (tensors,)).map(Some)
    }
}
