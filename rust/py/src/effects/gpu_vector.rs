//! Vectors of interventions as graphs of `torch.compile` take them on a GPU.

use std::sync::OnceLock;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::torch::made::StreamOrder;

/// Vector on one GPU, made when it is first read. An attribute, since Dynamo makes attributes of
/// native classes inputs of a graph and reads them anew in each call.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct GpuVector {
    make: Py<PyAny>,
    tensor: OnceLock<(Py<PyAny>, StreamOrder)>,
}

#[pymethods]
impl GpuVector {
    /// Args:
    ///     make: returns the vector.
    #[new]
    fn new(make: Py<PyAny>) -> Self {
        let tensor = OnceLock::new();
        Self { make, tensor }
    }

    /// The vector, ready for use on the current stream.
    #[getter]
    fn tensor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some((tensor, order)) = self.tensor.get() {
            order.begin_use(py)?;
            return Ok(tensor.bind(py).clone());
        }
        let tensor = self.make.bind(py).call0()?;
        if let Some(order) = StreamOrder::of(&PyTuple::new(py, [&tensor])?)? {
            let _ = self.tensor.set((tensor.clone().unbind(), order));
        }
        Ok(tensor)
    }

    // No `__clear__`: tensors refer to nothing here.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.make)?;
        visit.call(self.tensor.get().map(|(tensor, _)| tensor))
    }
}
