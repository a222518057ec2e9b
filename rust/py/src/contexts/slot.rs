//! State that others keep with a frame.

use std::any::Any;
use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

/// State of a slot that the hooks of its frame see while a call runs.
pub type SlotState = Arc<dyn Any + Send + Sync>;

/// State that others keep with a frame, for as long as it lives.
pub trait FrameSlot: Any + Send + Sync {
    /// True if calls in the entered frame run hooks of others for the module with this id.
    fn has_hooks(&self, _frame: &Bound<'_, PyAny>, _module: u64, _phases: &[Phase]) -> bool {
        false
    }

    /// Raises if the frame takes no hook, or none that needs gradients.
    fn check_hook(&self, _py: Python<'_>, _gradients: bool) -> PyResult<()> {
        Ok(())
    }

    /// The state that hooks of the frame see now, on this thread.
    fn state(&self) -> Option<SlotState> {
        None
    }

    /// Makes hooks find a former [state](Self::state) on this thread, until `end_repeat`.
    fn begin_repeat(&self, _state: SlotState) {}

    /// Ends the innermost repeat on this thread.
    fn end_repeat(&self) {}

    /// Releases what belongs to the open frame.
    fn close(&self) {}

    fn traverse(&self, _visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        Ok(())
    }
}
