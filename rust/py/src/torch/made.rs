//! Tensors that are made once and used by many calls, on whichever streams of a GPU these run.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Orders the uses of tensors after the kernels that made them.
pub enum StreamOrder {
    /// The tensors are not on a GPU, or their users know when they were made.
    Any,
    /// A `ferrohook.util.streams.Made`.
    After(Py<PyAny>),
}

impl StreamOrder {
    /// Order of tensors of one device that were made just now. None if they are part of a CUDA graph
    /// that is being captured, and must not be used by later calls.
    pub fn of(tensors: &Bound<'_, PyTuple>) -> PyResult<Option<Self>> {
        let py = tensors.py();
        let Ok(first) = tensors.get_item(0) else {
            return Ok(Some(Self::Any));
        };
        if !first.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            return Ok(Some(Self::Any));
        }
        let streams = py.import(intern!(py, "ferrohook.util.streams"))?;
        let made = streams.call_method1(intern!(py, "made"), (tensors,))?;
        Ok((!made.is_none()).then(|| Self::After(made.unbind())))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Any => Ok(()),
            Self::After(made) => visit.call(made),
        }
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::After(made) => Self::After(made.clone_ref(py)),
        }
    }

    /// Makes later work of the current stream wait for the kernels that made the tensors.
    pub fn begin_use(&self, py: Python<'_>) -> PyResult<()> {
        if let Self::After(made) = self {
            made.call_method0(py, intern!(py, "use"))?;
        }
        Ok(())
    }
}

/// Keeps the memory of a tensor that is about to be read until the current stream is done with it,
/// if it is on a GPU.
pub fn read(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        py.import(intern!(py, "ferrohook.util.streams"))?
            .call_method1(intern!(py, "read"), (tensor,))?;
    }
    Ok(())
}
