//! `RootCalls`: the native hook that marks the calls which a capture with `stop=True` may end.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::capture::collector::Collector;
use crate::capture::request::{CapturePlace, Source};
use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Turn};
use crate::rows::calls::merging::{InBatch, in_batch};

/// Native hook around the calls of the module that a capture stops.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct RootCalls(Source);

#[pymethods]
impl RootCalls {
    #[new]
    #[pyo3(signature = (collector, place = None))]
    fn new(collector: Py<Collector>, place: Option<CapturePlace>) -> (Self, NativeHook) {
        let hook = Self(Source {
            collector,
            place: place.unwrap_or_default(),
        });
        (hook, NativeHook::of::<Self>())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.traverse(&visit)
    }
}

impl InBatch for RootCalls {
    fn reads(&self, _positioned: bool) -> bool {
        false
    }
}

// A graph has no way to end a call early, so it breaks there.
impl Native for RootCalls {
    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let collector = self.0.of_owner(object.py(), turn.owner)?;
        if turn.phase == Phase::ForwardPre {
            collector.get().begin_call();
        } else {
            collector.get().end_call();
        }
        Ok(None)
    }
}
