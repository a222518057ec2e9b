//! `GateReadings`: readings of the gates of a request by the position of their tokens.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rustc_hash::FxHashMap;

use crate::error::hook_error;
use crate::gates::aggregation::{GateAggregation, Over, shown};
use crate::gates::readings::{Dropped, MadeOf, RowReadings};
use crate::rows::at::At;
use crate::rows::call_tokens::{CallTokens, RowTokens, last_of_prompt};
use crate::rows::places::Position;

/// Calls without a common KV cache whose readings a request stores for each gate.
const MOST_SEQUENCES: usize = 64;

/// Reason why a gate has no value.
pub enum Failure {
    /// The gate has not read the tokens yet that the value depends on.
    Unread(PyErr),
    Error(PyErr),
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Error(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Unread(error) | Failure::Error(error) => error,
        }
    }
}

/// End of a sequence whose plan has a `stop`.
#[derive(Clone)]
pub struct Stopped {
    /// Name of the gate; of several, with commas between them.
    pub gate: Arc<str>,
    /// Position of the token at which the condition was true.
    pub position: i64,
    /// Row of the sequence in its call.
    pub row: usize,
}

/// Readings by the row of their sequence.
type Rows = FxHashMap<usize, RowReadings>;

#[derive(Default)]
struct State {
    /// Rows by the name of the gate and the id of the sequences; the last used one is last.
    gates: FxHashMap<Arc<str>, Vec<(u64, Rows)>>,
    /// Stops by the id of the sequences and the row.
    stopped: FxHashMap<(u64, usize), Stopped>,
}

impl State {
    /// Returns the readings of some sequences by a gate.
    fn rows(&mut self, gate: &GateAggregation, sequences: u64, dropped: &mut Dropped) -> &mut Rows {
        if !self.gates.contains_key(&gate.name) {
            self.gates.insert(Arc::clone(&gate.name), Vec::new());
        }
        let found = self.gates.get_mut(&gate.name).expect("it was inserted");
        if found.last().is_none_or(|last| last.0 != sequences) {
            let known = found.iter().position(|it| it.0 == sequences);
            let moved = known.map_or_else(|| (sequences, Rows::default()), |at| found.remove(at));
            found.push(moved);
            if found.len() > MOST_SEQUENCES {
                let (_, rows) = found.remove(0);
                for row in rows.into_values() {
                    row.into_graphs(dropped);
                }
            }
        }
        &mut found.last_mut().expect("one was pushed").1
    }
}

/// Readings of the gates of one request, and the ends of its sequences.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
#[derive(Default)]
pub struct GateReadings {
    // No Python runs while it is held.
    state: Mutex<State>,
}

#[pymethods]
impl GateReadings {
    #[new]
    #[pyo3(signature = (*_others))]
    fn new(_others: &Bound<'_, PyTuple>) -> Self {
        Self::default()
    }

    /// Values of a gate at the tokens of a call; NaN where one is unknown.
    ///
    /// Raises:
    ///     HookError: tokens that the value depends on were not read, or the length of a prompt is
    ///         needed and not known.
    #[pyo3(name = "values")]
    fn values_for_python(
        &self,
        py: Python<'_>,
        gate: &GateAggregation,
        tokens: &CallTokens,
    ) -> PyResult<Vec<f64>> {
        Ok(self.values(py, gate, tokens)?)
    }

    /// Parts of the values of a gate at the tokens of a call, for each of its rows: readings, the same as
    /// tensors where they have a gradient, and for each value the number of readings up to its token, 0
    /// if it is unknown.
    fn made_of(&self, py: Python<'_>, gate: &GateAggregation, tokens: &CallTokens) -> Vec<MadeOf> {
        let made = tokens.by_row().map(|of_row| {
            self.with_row(gate, tokens.sequences, of_row.row, |row| {
                row.made_of(py, gate, of_row.positions, of_row.prompt)
            })
        });
        made.collect()
    }

    /// Drops the readings of some sequences from a position on: of drafts that were rejected.
    fn take_back(&self, position: i64, sequences: u64) {
        let mut dropped = Dropped::new();
        let mut state = self.state.lock();
        state
            .stopped
            .retain(|key, stopped| key.0 != sequences || stopped.position < position);
        for of_gate in state.gates.values_mut() {
            for (_, rows) in of_gate.iter_mut().filter(|it| it.0 == sequences) {
                for row in rows.values_mut() {
                    row.take_back(position, &mut dropped);
                }
            }
        }
        drop(state);
        drop(dropped);
    }

    /// Takes over the readings of another request before a position, whose tokens are this one's too.
    fn inherit(&self, other: &Self, position: i64) {
        let mut inherited = Vec::new();
        let others = other.state.lock();
        for (gate, of_gate) in &others.gates {
            for (sequences, rows) in of_gate {
                let before = rows
                    .iter()
                    .map(|(row, it)| (*row, it.readings_before(position)));
                inherited.push((Arc::clone(gate), *sequences, before.collect::<Vec<_>>()));
            }
        }
        drop(others);
        let mut state = self.state.lock();
        for (gate, sequences, rows) in inherited {
            let mut own = Rows::default();
            for (row, (positions, readings)) in rows {
                own.entry(row).or_default().add(&positions, &readings);
            }
            state.gates.entry(gate).or_default().push((sequences, own));
        }
    }

    /// Gate, position and row of the ends of sequences, in order of their rows; None: of all sequences.
    #[pyo3(signature = (sequences = None))]
    fn ends(&self, sequences: Option<u64>) -> Vec<(String, i64, usize)> {
        let state = self.state.lock();
        let own = state.stopped.iter();
        let own = own.filter(|(key, _)| sequences.is_none_or(|it| it == key.0));
        let mut found: Vec<_> = own
            .map(|(_, it)| (it.gate.to_string(), it.position, it.row))
            .collect();
        found.sort_by_key(|it| it.2);
        found
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(state) = self.state.try_lock() else {
            return Ok(());
        };
        let rows = state.gates.values().flatten().flat_map(|it| it.1.values());
        rows.flat_map(RowReadings::graphs)
            .try_for_each(|graph| visit.call(graph))
    }
}

impl GateReadings {
    /// Returns the readings of a request.
    pub fn of<'py>(request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let found = request.getattr(intern!(request.py(), "gates"))?;
        Ok(found.cast_into()?)
    }

    fn with_row<T>(
        &self,
        gate: &GateAggregation,
        sequences: u64,
        row: usize,
        use_it: impl FnOnce(&mut RowReadings) -> T,
    ) -> T {
        let mut dropped = Dropped::new();
        let mut state = self.state.lock();
        let rows = state.rows(gate, sequences, &mut dropped);
        let result = use_it(rows.entry(row).or_default());
        drop(state);
        drop(dropped);
        result
    }

    /// Stores readings of the tokens of a call, one for each. `graphs`: the same as tensors with a
    /// gradient; `again`: they replace earlier ones. Raises if one is NaN.
    pub fn add(
        &self,
        py: Python<'_>,
        gate: &GateAggregation,
        tokens: &CallTokens,
        readings: &[f64],
        graphs: Option<Vec<Py<PyAny>>>,
        again: bool,
    ) -> PyResult<()> {
        let mut graphs = graphs.map(Vec::into_iter);
        let mut start = 0;
        for of_row in tokens.by_row() {
            let end = start + of_row.positions.len();
            let (positions, own) = (of_row.positions, &readings[start..end]);
            if let Some(place) = own.iter().position(|it| it.is_nan()) {
                let (name, position) = (shown(py, &gate.name), positions[place].0);
                let message = format!("gate {name} is NaN at position {position}");
                return Err(hook_error(py, message));
            }
            let mut dropped = Dropped::new();
            self.with_row(gate, tokens.sequences, of_row.row, |row| {
                row.add(positions, own);
                let graphs = graphs.iter_mut().flatten().take(end - start);
                for (position, graph) in of_row.positions.iter().zip(graphs) {
                    row.add_graph(position.0, graph, again, &mut dropped);
                }
            });
            start = end;
        }
        Ok(())
    }

    /// Returns the values of a gate at the tokens of a call; NaN where one is unknown.
    pub fn values(
        &self,
        py: Python<'_>,
        gate: &GateAggregation,
        tokens: &CallTokens,
    ) -> Result<Vec<f64>, Failure> {
        let mut values = Vec::new();
        for of_row in tokens.by_row() {
            check_prompt(py, gate, of_row.prompt)?;
            let (found, unread) = self.with_row(gate, tokens.sequences, of_row.row, |row| {
                row.values(gate, of_row.positions, of_row.prompt)
            });
            if let Some(ends) = unread {
                let wanted: Vec<_> = ends.into_iter().filter(|end| *end >= 0).collect();
                if !wanted.is_empty() {
                    self.check_read(py, gate, tokens.sequences, &of_row, &wanted)?;
                }
            }
            values.extend(found);
        }
        Ok(values)
    }

    /// Checks that a gate has read the tokens that its values depend on. `wanted`: last positions of the
    /// values that are known.
    fn check_read(
        &self,
        py: Python<'_>,
        gate: &GateAggregation,
        sequences: u64,
        of_row: &RowTokens<'_>,
        wanted: &[i64],
    ) -> Result<(), Failure> {
        let first = wanted.iter().copied().min().unwrap_or(0);
        let end = wanted.iter().copied().max().unwrap_or(0) + 1;
        let counted = |positions: Vec<i64>| match &gate.at {
            Some(at) if !positions.is_empty() => counted(py, at, positions, of_row.prompt),
            _ => Ok(positions),
        };
        let missing = self.with_row(gate, sequences, of_row.row, |row| row.missing(gate, wanted));
        let mut missing = counted(missing)?;
        if missing.is_empty() {
            if gate.over != Over::Token {
                self.with_row(gate, sequences, of_row.row, |row| row.completed(end));
            }
            return Ok(());
        }
        if let Over::Window(size) = gate.over {
            // Only the last tokens matter.
            let needed = counted((0..=first).collect())?;
            let least = needed[needed.len().saturating_sub(size)..].first();
            let least = least.copied().unwrap_or(first);
            missing.retain(|it| *it >= least);
        }
        let Some(start) = missing.first().copied() else {
            return Ok(());
        };
        let name = shown(py, &gate.name);
        let place = if missing.len() == 1 {
            format!("position {start}")
        } else {
            format!("positions from {start} on")
        };
        let last = self.with_row(gate, sequences, of_row.row, |row| row.last());
        if last > Some(start) {
            let message = format!(
                "gate {name} did not read the tokens at {place}: they ran before this request, \
                 without the module that it reads, or at least {MOST_SEQUENCES} other sequences \
                 ago. Run the whole sequence in the request"
            );
            return Err(Failure::Error(hook_error(py, message)));
        }
        let lag = if gate.over == Over::Prompt || gate.lag != 0 {
            ""
        } else {
            ", or give it lag=1, for generated tokens that run one by one"
        };
        let message = format!(
            "gate {name} has not read the token at {place} yet: it reads later in the forward than \
             the hook that depends on it, or in an inner call with other ids or another mask, or the \
             token ran before this request. Let it read at an earlier place, from the first token \
             on{lag}"
        );
        Err(Failure::Unread(hook_error(py, message)))
    }

    /// Notes that a sequence has ended; the first end after its prompt counts. `prompt`: its length.
    pub fn stop(&self, sequences: u64, stopped: Stopped, prompt: Option<i64>) {
        let last = last_of_prompt(prompt);
        let mut state = self.state.lock();
        let known = state.stopped.get(&(sequences, stopped.row));
        if known.is_none_or(|it| !(last..=stopped.position).contains(&it.position)) {
            state.stopped.insert((sequences, stopped.row), stopped);
        }
    }
}

/// Returns which of some positions a gate counts.
fn counted(
    py: Python<'_>,
    at: &At,
    positions: Vec<i64>,
    prompt: Option<i64>,
) -> PyResult<Vec<i64>> {
    let each: Vec<_> = positions.iter().copied().map(Position).collect();
    at.check(py, prompt)?;
    let places = at.places(py, &each, each.len(), prompt.as_slice())?;
    Ok(places.into_iter().map(|place| positions[place.0]).collect())
}

/// Raises if the values of a gate need the length of a prompt that is not known.
fn check_prompt(py: Python<'_>, gate: &GateAggregation, prompt: Option<i64>) -> PyResult<()> {
    if prompt.is_some() {
        return Ok(());
    }
    if gate.needs_prompt() {
        let what = if gate.lag == 0 {
            "over='prompt'"
        } else {
            "lag="
        };
        let message = format!(
            "gate {} needs the length of the prompt for {what}, and this call does not show it: \
             pass it with prepared.open(prompt=...)",
            shown(py, &gate.name)
        );
        return Err(hook_error(py, message));
    }
    gate.at.as_ref().map_or(Ok(()), |at| at.check(py, prompt))
}
