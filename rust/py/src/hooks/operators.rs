//! Operators: places in the graphs of a module at which hooks come and go without a new trace.

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// Operators of one module. Each is laid when a hook for it is traced first, and stays.
#[derive(Default)]
pub struct Operators(Mutex<Vec<Operator>>);

struct Operator {
    phase: Phase,
    key: String,
    callback: Py<PyAny>,
}

impl Operators {
    /// Lays the operator of this key, unless it is there.
    pub fn lay(&self, phase: Phase, key: String, callback: Py<PyAny>) {
        let mut operators = self.0.lock();
        let known = |each: &Operator| each.phase == phase && each.key == key;
        if operators.iter().any(known) {
            drop(operators); // before `callback`, whose destructor may run code
            return;
        }
        operators.push(Operator {
            phase,
            key,
            callback,
        });
    }

    /// Returns the callbacks of a phase, in the order in which they were laid.
    pub fn callbacks<'py>(&self, py: Python<'py>, phase: Phase) -> Vec<Bound<'py, PyAny>> {
        let operators = self.0.lock();
        let of_phase = operators.iter().filter(|each| each.phase == phase);
        of_phase
            .map(|each| each.callback.bind(py).clone())
            .collect()
    }

    pub fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let operators = self.0.lock();
        operators
            .iter()
            .try_for_each(|each| visit.call(&each.callback))
    }

    pub fn clear(&self) {
        let _dropped_unlocked = std::mem::take(&mut *self.0.lock());
    }
}
