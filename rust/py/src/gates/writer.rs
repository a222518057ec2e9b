//! `GateWriter`: stores the readings of a gate, and ends requests with them.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::gates::aggregation::GateAggregation;
use crate::gates::conditions::StopCheck;
use crate::gates::state::GateReadings;
use crate::rows::call_tokens::CallTokens;

/// Stores readings of a gate, and checks the stops that depend on it.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct GateWriter {
    gate: Py<GateAggregation>,
    /// The plan's stops that depend on the gate.
    stops: Vec<Py<StopCheck>>,
}

#[pymethods]
impl GateWriter {
    #[new]
    fn new(gate: Py<GateAggregation>, stops: Vec<Py<StopCheck>>) -> Self {
        Self { gate, stops }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.gate)?;
        self.stops.iter().try_for_each(|stop| visit.call(stop))
    }
}

impl GateWriter {
    fn write(
        &self,
        request: &Bound<'_, PyAny>,
        tokens: &CallTokens,
        readings: &[f64],
        graphs: Option<Vec<Py<PyAny>>>,
        again: bool,
    ) -> PyResult<()> {
        let py = request.py();
        let states = GateReadings::of(request)?;
        let states = states.get();
        states.add(py, self.gate.get(), tokens, readings, graphs, again)?;
        for stop in &self.stops {
            stop.get().check(py, states, tokens)?;
        }
        Ok(())
    }
}

/// Stores readings of gates of several requests, and checks the stops that depend on them.
///
/// `given`: request and tokens of each of the writers. `readings`: of the tokens, one request after the
/// other. `graphs`: the same as tensors for each, or None. `again`: these replace earlier ones, which
/// refuse their gradient.
///
/// Returns the exception of each request, None for one without.
#[pyfunction]
#[pyo3(signature = (writers, given, readings, graphs, *, again))]
pub fn store_readings<'py>(
    py: Python<'py>,
    writers: Vec<Bound<'py, GateWriter>>,
    given: Vec<(Bound<'py, PyAny>, Bound<'py, CallTokens>)>,
    readings: Vec<f64>,
    graphs: Option<Vec<Option<Vec<Py<PyAny>>>>>,
    again: bool,
) -> Vec<Option<Bound<'py, PyAny>>> {
    let mut graphs = graphs.map(Vec::into_iter);
    let mut start = 0;
    let errors = writers
        .iter()
        .zip(&given)
        .map(|(writer, (request, tokens))| {
            let end = start + tokens.get().len();
            let own = graphs.as_mut().and_then(Iterator::next).flatten();
            let written =
                writer
                    .get()
                    .write(request, tokens.get(), &readings[start..end], own, again);
            start = end;
            written
                .err()
                .map(|it| it.into_value(py).into_bound(py).into_any())
        });
    errors.collect()
}
