//! `RecordedLayerBase`: the native hook that records a layer's outputs for calls of its model.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::hooks::native::{Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::recorded::call::{LayerKey, RecordedCall, innermost};
use crate::recorded::installation::InstallationBase;

/// Native half of a `RecordedLayer`: the hook of a recorded layer, behind all others. A layer with
/// other recorded ones inside has it in the phase `forward_pre` too.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct RecordedLayerBase {
    installation: Py<InstallationBase>,
    keys: Vec<LayerKey>,
}

/// In-flight call that a layer runs for.
enum Owner<'py> {
    Call(Bound<'py, RecordedCall>),
    /// A call of another model, or one that is not recorded.
    Other,
    /// The context has no call: Python searches for it.
    Unknown,
}

#[pymethods]
impl RecordedLayerBase {
    #[new]
    #[pyo3(signature = (installation, keys, *_others))]
    fn new(
        installation: Py<InstallationBase>,
        keys: Vec<LayerKey>,
        _others: &Bound<'_, PyTuple>,
    ) -> (Self, NativeHook) {
        let layer = Self { installation, keys };
        (layer, NativeHook::of::<Self>())
    }

    /// Records the layer's output for a call, if that has the same installation.
    ///
    /// Raises:
    ///     SelectionError: the output is a tuple without that item.
    fn record(
        &self,
        call: &Bound<'_, RecordedCall>,
        args: &Bound<'_, PyTuple>,
        kwargs: &Bound<'_, PyDict>,
        output: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if call.get().uses(&self.installation) {
            call.get().record(&self.keys, args, Some(kwargs), output)?;
        }
        Ok(())
    }

    // No `__clear__`: it is immutable, so a cycle through it has another edge to cut.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.installation)?;
        self.keys
            .iter()
            .try_for_each(|key| visit.call(&key.convert))
    }
}

impl RecordedLayerBase {
    fn owner<'py>(&self, py: Python<'py>) -> PyResult<Owner<'py>> {
        if !self.installation.get().watched() {
            return Ok(Owner::Other);
        }
        Ok(match innermost(py)? {
            None => Owner::Unknown,
            Some(call) if call.get().uses(&self.installation) => Owner::Call(call),
            Some(_) => Owner::Other,
        })
    }
}

impl Native for RecordedLayerBase {
    fn last(&self) -> bool {
        true
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let kwargs = || turn.kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
        match (turn.phase, self.owner(py)?) {
            (Phase::Forward, Owner::Call(call)) => {
                call.get()
                    .record(&self.keys, turn.args, turn.kwargs, turn.value)?;
            }
            (Phase::Forward, Owner::Unknown) => {
                let arguments = (turn.args, kwargs(), turn.value);
                object.call_method1(intern!(py, "end"), arguments)?;
            }
            (Phase::ForwardPre, Owner::Unknown) => {
                object.call_method1(intern!(py, "begin"), (turn.args, kwargs()))?;
            }
            _ => {}
        }
        Ok(None)
    }

    // For an eager call the native call records, so the trace is not faithful.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, phase: Phase) -> Trace<'py> {
        if phase != Phase::Forward {
            return Ok(None);
        }
        let owner = self.owner(object.py())?;
        Ok(Some(Traced {
            faithful: !matches!(owner, Owner::Call(_)),
            ..Traced::plain(object.clone(), true)
        }))
    }
}
