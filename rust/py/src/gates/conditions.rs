//! Conditions on gates, and what depends on them: the choice of tokens, and stops.

use std::sync::Arc;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::gates::aggregation::{GateAggregation, float32};
use crate::gates::state::{Failure, GateReadings, Stopped};
use crate::rows::call_tokens::CallTokens;
use crate::torch;
use crate::torch::tensors::host_tensor;

/// A gate of a plan.
type Gate = Py<GateAggregation>;

/// True, false, or None where it is unknown.
type Truth = Option<bool>;

/// Bound of a comparison.
enum Limit {
    None,
    Number(f64),
    Gate(Gate),
}

/// Condition on gates, as the classes of Python.
enum Condition {
    Comparison {
        gate: Gate,
        low: Limit,
        high: Limit,
        /// True if the bounds themselves are included.
        closed: bool,
    },
    /// True if all are, or one is.
    Combined {
        conditions: Vec<Condition>,
        needs_all: bool,
    },
    Not(Box<Condition>),
}

/// Returns the gate of a name.
fn gate_of(gates: &Bound<'_, PyDict>, name: &Bound<'_, PyAny>) -> PyResult<Gate> {
    Ok(gates.as_any().get_item(name)?.cast_into()?.unbind())
}

impl Limit {
    fn of(gates: &Bound<'_, PyDict>, bound: &Bound<'_, PyAny>) -> PyResult<Self> {
        if bound.is_none() {
            return Ok(Self::None);
        }
        match bound.extract() {
            Ok(number) => Ok(Self::Number(float32(number))),
            Err(_) => Ok(Self::Gate(gate_of(gates, bound)?)),
        }
    }

    /// Returns it at each of some tokens; None: there is none.
    fn at(&self, values: &ValuesOf<'_>, count: usize) -> Result<Option<Vec<f64>>, Failure> {
        Ok(match self {
            Self::None => None,
            Self::Number(number) => Some(vec![*number; count]),
            Self::Gate(gate) => Some(values.of(gate)?),
        })
    }
}

/// Values of gates at the tokens of a call.
struct ValuesOf<'a> {
    py: Python<'a>,
    states: &'a GateReadings,
    tokens: &'a CallTokens,
}

impl ValuesOf<'_> {
    fn of(&self, gate: &Gate) -> Result<Vec<f64>, Failure> {
        self.states.values(self.py, gate.get(), self.tokens)
    }
}

impl Condition {
    /// Reads one of Python's conditions.
    fn of(gates: &Bound<'_, PyDict>, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = given.py();
        if let Ok(conditions) = given.getattr(intern!(py, "conditions")) {
            let conditions = conditions.try_iter()?.map(|it| Self::of(gates, &it?));
            return Ok(Self::Combined {
                conditions: conditions.collect::<PyResult<_>>()?,
                needs_all: given.getattr(intern!(py, "needs_all"))?.extract()?,
            });
        }
        if let Ok(one) = given.getattr(intern!(py, "one")) {
            return Ok(Self::Not(Box::new(Self::of(gates, &one)?)));
        }
        Ok(Self::Comparison {
            gate: gate_of(gates, &given.getattr(intern!(py, "gate"))?)?,
            low: Limit::of(gates, &given.getattr(intern!(py, "low"))?)?,
            high: Limit::of(gates, &given.getattr(intern!(py, "high"))?)?,
            closed: given.getattr(intern!(py, "closed"))?.extract()?,
        })
    }

    /// Evaluates it at the tokens.
    fn at(&self, values: &ValuesOf<'_>) -> Result<Vec<Truth>, Failure> {
        match self {
            Self::Comparison {
                gate,
                low,
                high,
                closed,
            } => {
                let own = values.of(gate)?;
                let low = low.at(values, own.len())?;
                let high = high.at(values, own.len())?;
                let at =
                    |bound: &Option<Vec<f64>>, place: usize| bound.as_ref().map(|it| it[place]);
                let truth = |(place, value): (usize, &f64)| {
                    truth(*value, at(&low, place), at(&high, place), *closed)
                };
                Ok(own.iter().enumerate().map(truth).collect())
            }
            Self::Combined {
                conditions,
                needs_all,
            } => {
                // One of them decides.
                let decides = Some(!needs_all);
                let mut all = vec![Some(*needs_all); values.tokens.len()];
                for each in conditions {
                    for (so_far, truth) in all.iter_mut().zip(each.at(values)?) {
                        if *so_far != decides && truth != Some(*needs_all) {
                            *so_far = truth;
                        }
                    }
                }
                Ok(all)
            }
            Self::Not(one) => Ok(one
                .at(values)?
                .into_iter()
                .map(|it| it.map(|it| !it))
                .collect()),
        }
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Comparison {
                gate, low, high, ..
            } => {
                for bound in [low, high] {
                    if let Limit::Gate(gate) = bound {
                        visit.call(gate)?;
                    }
                }
                visit.call(gate)
            }
            Self::Combined { conditions, .. } => {
                conditions.iter().try_for_each(|each| each.traverse(visit))
            }
            Self::Not(one) => one.traverse(visit),
        }
    }
}

/// Compares a value with its bounds; unknown where one of them is.
fn truth(value: f64, low: Option<f64>, high: Option<f64>, closed: bool) -> Truth {
    let numbers = [Some(value), low, high];
    if numbers.into_iter().flatten().any(f64::is_nan) {
        return None;
    }
    let above = low.is_none_or(|low| value > low || (closed && value >= low));
    let below = high.is_none_or(|high| value < high || (closed && value <= high));
    Some(above && below)
}

/// Strength that follows a gate: 0 at `start`, 1 at `end`.
struct Ramp {
    gate: Gate,
    start: f64,
    end: f64,
}

/// Shares of a change that are made at some tokens.
pub enum Strengths<'py> {
    /// All of it, or the hook's own strength.
    Constant,
    Numbers(Vec<f64>),
    /// Tensor with a gradient.
    Recorded(Bound<'py, PyAny>),
}

impl<'py> Strengths<'py> {
    /// Returns them as a tensor; None for a constant one.
    pub fn tensor(self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(match self {
            Self::Constant => None,
            Self::Numbers(numbers) => Some(host_tensor(py, numbers, "float32")?),
            Self::Recorded(tensor) => Some(tensor),
        })
    }
}

/// Chooses the tokens that a hook changes, by its condition, and its strength there.
///
/// Args:
///     gates: the plan's gates by name.
///     when: the condition; None for none.
///     follows: strength that follows a gate; None for none.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct TokenChoice {
    when: Option<Condition>,
    /// Ramp that it follows, with Python's.
    follows: Option<(Ramp, Py<PyAny>)>,
}

#[pymethods]
impl TokenChoice {
    #[new]
    #[pyo3(signature = (gates, when, follows))]
    fn new(
        gates: &Bound<'_, PyDict>,
        when: Option<&Bound<'_, PyAny>>,
        follows: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let ramp = |ramp: Bound<'_, PyAny>| {
            let of_ramp = Ramp {
                gate: gate_of(gates, &ramp.getattr("gate")?)?,
                start: ramp.getattr("start")?.extract()?,
                end: ramp.getattr("end")?.extract()?,
            };
            Ok::<_, PyErr>((of_ramp, ramp.unbind()))
        };
        Ok(Self {
            when: when.map(|it| Condition::of(gates, it)).transpose()?,
            follows: follows.map(ramp).transpose()?,
        })
    }

    /// Returns which of some tokens are changed, and a tensor of strengths if these follow a gate.
    ///
    /// Raises:
    ///     HookError: see `GateReadings.values`.
    fn __call__<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        tokens: &CallTokens,
    ) -> PyResult<(Vec<bool>, Option<Bound<'py, PyAny>>)> {
        let (acts, strengths) = self.decide(request, tokens)?;
        Ok((acts, strengths.tensor(request.py())?))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(when) = &self.when {
            when.traverse(&visit)?;
        }
        if let Some((ramp, of_python)) = &self.follows {
            visit.call(&ramp.gate)?;
            visit.call(of_python)?;
        }
        Ok(())
    }
}

impl TokenChoice {
    /// Chooses some tokens.
    pub fn decide<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        tokens: &CallTokens,
    ) -> PyResult<(Vec<bool>, Strengths<'py>)> {
        let py = request.py();
        let owner = GateReadings::of(request)?;
        let states = owner.get();
        let values = ValuesOf { py, states, tokens };
        let mut acts = match &self.when {
            None => vec![true; tokens.len()],
            Some(when) => {
                let truths = when.at(&values)?.into_iter();
                truths.map(|it| it == Some(true)).collect()
            }
        };
        let Some((ramp, of_python)) = &self.follows else {
            return Ok((acts, Strengths::Constant));
        };
        let values = values.of(&ramp.gate)?;
        for (act, value) in acts.iter_mut().zip(&values) {
            *act &= !value.is_nan();
        }
        if torch::is_grad_enabled(py)? {
            let arguments = (of_python, tokens.clone(), values.clone(), &acts);
            let recorded = owner.call_method1(intern!(py, "recorded_strengths"), arguments)?;
            if !recorded.is_none() {
                return Ok((acts, Strengths::Recorded(recorded)));
            }
        }
        let length = ramp.end - ramp.start;
        // An unknown one is not used, and NaN would reach gradients.
        let strength = |value: f64| match value {
            value if value.is_nan() => 0.0,
            value => ((value - ramp.start) / length).clamp(0.0, 1.0),
        };
        let strengths = values.into_iter().map(strength).collect();
        Ok((acts, Strengths::Numbers(strengths)))
    }
}

/// Checks at which tokens a plan ends its request.
///
/// Args:
///     gates: the plan's gates by name.
///     when: the condition.
///     name: name of the gate; of several, with commas between them.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct StopCheck {
    when: Condition,
    name: Arc<str>,
}

#[pymethods]
impl StopCheck {
    #[new]
    fn new(gates: &Bound<'_, PyDict>, when: &Bound<'_, PyAny>, name: String) -> PyResult<Self> {
        let when = Condition::of(gates, when)?;
        let name = name.into();
        Ok(Self { when, name })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.when.traverse(&visit)
    }
}

impl StopCheck {
    /// Notes the first token of each sequence at which the condition is true.
    ///
    /// The last token of the prompt and generated ones count. Called after each of the gates has
    /// read some tokens: the last one of a forward decides.
    pub fn check(
        &self,
        py: Python<'_>,
        states: &GateReadings,
        tokens: &CallTokens,
    ) -> PyResult<()> {
        let own = tokens.since_last_prompt();
        let values = ValuesOf {
            py,
            states,
            tokens: &own,
        };
        let truths = match self.when.at(&values) {
            Err(Failure::Unread(_)) => return Ok(()),
            truths => truths?,
        };
        let mut truths = truths.into_iter();
        for of_row in own.by_row() {
            for (position, truth) in of_row.positions.iter().zip(&mut truths) {
                if truth == Some(true) {
                    let stopped = Stopped {
                        gate: Arc::clone(&self.name),
                        position: position.0,
                        row: of_row.row,
                    };
                    states.stop(own.sequences, stopped, of_row.prompt);
                }
            }
        }
        Ok(())
    }
}
