//! Readings of one sequence by one gate.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use rustc_hash::FxHashMap;

use crate::gates::aggregation::{GateAggregation, Over};
use crate::rows::places::Position;

/// Tensors that are dropped once no lock is held: a finaliser may run.
pub type Dropped = Vec<Py<PyAny>>;

/// Readings of one sequence.
#[derive(Default)]
pub struct RowReadings {
    /// Ascending.
    positions: Vec<Position>,
    /// One for each position.
    readings: Vec<f64>,
    /// See [`GateAggregation::values`].
    running: Vec<f64>,
    /// Readings by position that have a gradient: float32, ().
    graphs: FxHashMap<i64, Py<PyAny>>,
    /// Number of the first readings that the gate is known to count.
    counting: usize,
    /// Tokens before this position that the gate counts are known to have been read.
    complete: i64,
    /// Length of the prompt with which that was found; None if it is not known.
    prompt: Option<i64>,
}

/// Readings from which values are made, the same as tensors where they have a gradient, and for each
/// value the number of readings up to its token, 0 if it is unknown.
pub type MadeOf = (Vec<f64>, Vec<Option<Py<PyAny>>>, Vec<usize>);

impl RowReadings {
    /// Stores readings at positions. A token that runs again, or stands in several places, keeps its
    /// first one.
    pub fn add(&mut self, positions: &[Position], readings: &[f64]) {
        let ascending = positions.is_sorted_by(|one, next| one < next);
        if ascending && self.positions.last() < positions.first() {
            self.positions.extend(positions);
            self.readings.extend(readings);
            return;
        }
        let own = self.positions.iter().zip(&self.readings);
        let given = positions.iter().zip(readings).rev();
        let stored: BTreeMap<_, _> = given.chain(own).collect(); // the last of a position counts
        if stored.len() > self.positions.len() {
            // Readings before others: later values have changed.
            (self.positions, self.readings) = stored.into_iter().unzip();
            self.restart();
        }
    }

    /// Stores the tensor of a reading that has a gradient, unless there is one; `again`: even then.
    pub fn add_graph(
        &mut self,
        position: i64,
        graph: Py<PyAny>,
        again: bool,
        dropped: &mut Dropped,
    ) {
        match self.graphs.insert(position, graph) {
            Some(other) if !again => dropped.extend(self.graphs.insert(position, other)),
            other => dropped.extend(other),
        }
    }

    /// Drops the readings from a position on.
    pub fn take_back(&mut self, position: i64, dropped: &mut Dropped) {
        let end = self.before(position);
        if end < self.positions.len() {
            self.positions.truncate(end);
            self.readings.truncate(end);
            self.restart();
            let graphs = self.graphs.extract_if(|at, _| *at >= position);
            dropped.extend(graphs.map(|(_, graph)| graph));
        }
        self.complete = self.complete.min(position);
    }

    /// Returns the positions before one, and their readings.
    pub fn readings_before(&self, position: i64) -> (Vec<Position>, Vec<f64>) {
        let end = self.before(position);
        (
            self.positions[..end].to_vec(),
            self.readings[..end].to_vec(),
        )
    }

    /// Gives its tensors away.
    pub fn into_graphs(self, dropped: &mut Dropped) {
        dropped.extend(self.graphs.into_values());
    }

    pub fn graphs(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.graphs.values()
    }

    /// Drops the values computed from the readings.
    fn restart(&mut self) {
        self.running.clear();
        self.counting = 0;
    }

    /// Number of the readings before a position.
    fn before(&self, position: i64) -> usize {
        self.positions.partition_point(|it| it.0 < position)
    }

    fn has_read(&self, position: i64) -> bool {
        self.positions.binary_search(&Position(position)).is_ok()
    }

    /// Position of the last reading.
    pub fn last(&self) -> Option<i64> {
        self.positions.last().map(|it| it.0)
    }

    /// Notes the prompt of the running call; returns the readings that count, None for all.
    ///
    /// They differ from the stored ones after a further turn, whose prompt is another.
    fn counted(
        &mut self,
        gate: &GateAggregation,
        prompt: Option<i64>,
    ) -> Option<(Vec<Position>, Vec<f64>)> {
        if self.prompt != prompt {
            self.complete = 0;
            self.restart();
            self.prompt = prompt;
        }
        let at = gate.at.as_ref().filter(|_| gate.counts_from_prompt)?;
        let counts = at.test(prompt)?;
        if self.positions[self.counting..].iter().all(|it| counts(*it)) {
            self.counting = self.positions.len();
            return None;
        }
        let pairs = self.positions.iter().zip(&self.readings);
        Some(pairs.filter(|(position, _)| counts(**position)).unzip())
    }

    /// Makes the values of the gate at ascending or other positions; None in place of `ends` if the
    /// tokens that they depend on are known to have been read.
    pub fn values(
        &mut self,
        gate: &GateAggregation,
        positions: &[Position],
        prompt: Option<i64>,
    ) -> (Vec<f64>, Option<Vec<i64>>) {
        let ends = gate.ends(positions, prompt);
        let filtered = self.counted(gate, prompt);
        let (read, readings) = match &filtered {
            None => (&self.positions, &self.readings),
            Some((positions, readings)) => (positions, readings),
        };
        let counts = counts_of(gate, read, &ends);
        let values = gate.values(readings, &counts, &mut self.running);
        let most = ends.iter().copied().max();
        let known = if gate.over == Over::Token {
            !counts.contains(&0)
        } else if read.last().map(|it| it.0) == most && most == Some(self.complete) {
            self.complete += 1; // the next token
            true
        } else {
            most < Some(self.complete)
        };
        (values, (!known).then_some(ends))
    }

    /// Returns the readings from which the values at positions are made.
    pub fn made_of(
        &mut self,
        py: Python<'_>,
        gate: &GateAggregation,
        positions: &[Position],
        prompt: Option<i64>,
    ) -> MadeOf {
        let ends = gate.ends(positions, prompt);
        let filtered = self.counted(gate, prompt);
        let (positions, mut readings) =
            filtered.unwrap_or_else(|| (self.positions.clone(), self.readings.clone()));
        let counts = counts_of(gate, &positions, &ends);
        let end = counts.iter().copied().max().unwrap_or(0);
        readings.truncate(end);
        let graph = |at: &Position| self.graphs.get(&at.0).map(|it| it.clone_ref(py));
        let graphs = positions[..end].iter().map(graph).collect();
        (readings, graphs, counts)
    }

    /// Returns the positions that were asked for and not read, ascending. `wanted`: last positions of
    /// values that are known, at least one.
    pub fn missing(&self, gate: &GateAggregation, wanted: &[i64]) -> Vec<i64> {
        if gate.over == Over::Token {
            let mut asked: Vec<_> = wanted
                .iter()
                .copied()
                .filter(|it| !self.has_read(*it))
                .collect();
            asked.sort_unstable();
            asked.dedup();
            return asked;
        }
        let (start, end) = (
            self.complete,
            wanted.iter().max().map_or(0, |last| last + 1),
        );
        let count = usize::try_from(end - start).unwrap_or(0);
        if count == 0 || self.before(end) - self.before(start) >= count {
            return Vec::new();
        }
        (start..end).filter(|it| !self.has_read(*it)).collect()
    }

    /// Notes that the tokens that count before a position were read.
    pub fn completed(&mut self, end: i64) {
        self.complete = self.complete.max(end);
    }
}

/// Returns for each value the number of readings up to its token, 0 if it is unknown.
fn counts_of(gate: &GateAggregation, read: &[Position], ends: &[i64]) -> Vec<usize> {
    let count = |end: &i64| {
        let count = read.partition_point(|it| it.0 <= *end);
        let own = count > 0 && read[count - 1].0 == *end;
        // The value of a token is unknown if the gate does not count it.
        if gate.over != Over::Token || own {
            count
        } else {
            0
        }
    };
    let counts = ends.iter().map(count);
    counts
        .map(|count| if count < gate.least() { 0 } else { count })
        .collect()
}
