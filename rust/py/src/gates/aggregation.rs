//! `GateAggregation`: makes values of a gate from its readings.

use std::sync::Arc;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::repr;
use crate::rows::at::At;
use crate::rows::places::Position;

/// Readings that make up a value.
#[derive(Clone, Copy, PartialEq)]
pub enum Over {
    Token,
    Prompt,
    SoFar,
    Window(usize),
    /// Exponential moving average, with its decay.
    Ema(f64),
}

/// Reduction of readings to one value.
#[derive(Clone, Copy, PartialEq)]
pub enum By {
    Max,
    Min,
    Mean,
    Last,
}

impl<'py> FromPyObject<'_, 'py> for Over {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = given.cast::<PyString>() {
            return Ok(match name.to_str()? {
                "token" => Self::Token,
                "prompt" => Self::Prompt,
                _ => Self::SoFar,
            });
        }
        if let Ok(size) = given.getattr("size") {
            // No sequence has more tokens.
            return Ok(Self::Window(size.extract().unwrap_or(usize::MAX)));
        }
        Ok(Self::Ema(given.getattr("decay")?.extract()?))
    }
}

impl<'py> FromPyObject<'_, 'py> for By {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(match given.cast::<PyString>()?.to_str()? {
            "max" => Self::Max,
            "min" => Self::Min,
            "mean" => Self::Mean,
            _ => Self::Last,
        })
    }
}

impl By {
    /// Returns the greater or the smaller one; of equal ones the first.
    fn chosen(self, one: f64, other: f64) -> f64 {
        let other_wins = if self == Self::Min {
            other < one
        } else {
            other > one
        };
        if other_wins { other } else { one }
    }
}

/// Rounds a number to the precision of readings and their bounds.
#[expect(clippy::cast_possible_truncation, reason = "that is what it is for")]
pub fn float32(number: f64) -> f64 {
    f64::from(number as f32)
}

#[expect(clippy::cast_precision_loss, reason = "no sequence has 2**52 tokens")]
fn as_float(count: usize) -> f64 {
    count as f64
}

/// Rule by which a gate makes values of its readings.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct GateAggregation {
    pub name: Arc<str>,
    /// Tokens that it reads; None: all.
    pub at: Option<At>,
    pub over: Over,
    pub by: By,
    /// Number of tokens before a token at which its value is taken; 0: there.
    pub lag: i64,
    /// True if the tokens that it reads depend on the length of the prompt.
    pub counts_from_prompt: bool,
}

#[pymethods]
impl GateAggregation {
    #[new]
    fn new(name: String, at: Option<At>, over: Over, by: By, lag: i64) -> Self {
        Self {
            name: name.into(),
            counts_from_prompt: at.as_ref().is_some_and(At::needs_prompt),
            at,
            over,
            by,
            lag,
        }
    }

    /// Makes values, each with the precision of float32; of an unknown one NaN.
    ///
    /// `counts`: for each value the number of readings up to its token, 0 if it is unknown.
    #[pyo3(name = "values")]
    fn values_for_python(&self, readings: Vec<f64>, counts: Vec<usize>) -> Vec<f64> {
        self.values(&readings, &counts, &mut Vec::new())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.at.as_ref().map_or(Ok(()), |at| at.traverse(&visit))
    }
}

impl GateAggregation {
    /// Makes values from readings in order of position, each with the precision of float32.
    ///
    /// `counts`: for each value the number of readings up to its token, with `over="prompt"` only in
    /// the prompt. The value is NaN if the count is 0, or less than a window has. `running`: results after
    /// each of the first readings, as an earlier call left them, which are extended.
    pub fn values(&self, readings: &[f64], counts: &[usize], running: &mut Vec<f64>) -> Vec<f64> {
        let stepwise = match (self.over, self.by) {
            (Over::Ema(_), _) => true,
            (Over::Token | Over::Window(_), _) | (_, By::Last) => false,
            (Over::Prompt | Over::SoFar, _) => true,
        };
        if stepwise {
            let end = counts.iter().copied().max().unwrap_or(0);
            for reading in readings.iter().take(end).skip(running.len()) {
                let next = running
                    .last()
                    .map_or(*reading, |it| self.step(*it, *reading));
                running.push(next);
            }
        }
        let value = |count: &usize| {
            let count = *count;
            if count < self.least() {
                return f64::NAN;
            }
            match (self.over, self.by) {
                (Over::Ema(_), _) => float32(running[count - 1]),
                (Over::Token, _) | (_, By::Last) => readings[count - 1],
                (Over::Window(size), by) => of_window(&readings[count - size..count], by),
                (Over::Prompt | Over::SoFar, By::Mean) => {
                    float32(running[count - 1] / as_float(count))
                }
                (Over::Prompt | Over::SoFar, _) => running[count - 1],
            }
        };
        counts.iter().map(value).collect()
    }

    /// Number of readings without which a value is unknown.
    pub fn least(&self) -> usize {
        match self.over {
            Over::Window(size) => size,
            _ => 1,
        }
    }

    /// Returns the result after a further reading.
    fn step(&self, result: f64, reading: f64) -> f64 {
        match (self.over, self.by) {
            (Over::Ema(decay), _) => decay * result + (1.0 - decay) * reading,
            (_, By::Mean) => result + reading,
            (_, by) => by.chosen(result, reading),
        }
    }

    /// Returns the last position whose reading each value may have; negative if the value is unknown.
    pub fn ends(&self, positions: &[Position], prompt: Option<i64>) -> Vec<i64> {
        let prompt = prompt.unwrap_or(0);
        let end = |position: &Position| match (self.over, self.lag) {
            (Over::Prompt, _) if position.0 >= prompt - 1 => prompt - 1,
            (Over::Prompt, _) => -1,
            (_, 0) => position.0,
            (_, lag) if position.0 >= prompt => position.0 - lag,
            _ => -1,
        };
        positions.iter().map(end).collect()
    }

    /// True if its values depend on the length of the prompt.
    pub fn needs_prompt(&self) -> bool {
        self.lag != 0 || self.over == Over::Prompt
    }
}

fn of_window(readings: &[f64], by: By) -> f64 {
    if by == By::Mean {
        return float32(readings.iter().sum::<f64>() / as_float(readings.len()));
    }
    let chosen = readings
        .iter()
        .copied()
        .reduce(|one, other| by.chosen(one, other));
    chosen.unwrap_or(f64::NAN)
}

/// Shows a name in an error as Python does.
pub fn shown(py: Python<'_>, name: &str) -> String {
    repr(&PyString::new(py, name))
}
