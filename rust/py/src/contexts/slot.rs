//! State that others keep with a frame.

use std::any::Any;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// State that others keep with a frame, for as long as it lives.
pub trait Slot: Any + Send + Sync {
    /// True if calls in the entered frame run hooks of others for the module with this id.
    fn has_hooks(&self, _frame: &Bound<'_, PyAny>, _module: u64, _phases: &[Phase]) -> bool {
        false
    }

    /// Raises if the frame takes no hook, or none that needs gradients.
    fn check_hook(&self, _py: Python<'_>, _gradients: bool) -> PyResult<()> {
        Ok(())
    }

    /// Releases what belongs to the open frame.
    fn close(&self) {}

    fn traverse(&self, _visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        Ok(())
    }
}
