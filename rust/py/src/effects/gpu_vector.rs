//! Vectors of interventions as graphs of `torch.compile` take them on a GPU.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::torch::made::MadeTensors;

/// Vector on one GPU, made when it is first read. An attribute, since Dynamo makes attributes of
/// native classes inputs of a graph and reads them anew in each call.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct GpuVector {
    make: Py<PyAny>,
    tensor: MadeTensors<()>,
}

#[pymethods]
impl GpuVector {
    /// Args:
    ///     make: returns the vector.
    #[new]
    fn new(make: Py<PyAny>) -> Self {
        let tensor = MadeTensors::default();
        Self { make, tensor }
    }

    /// The vector, ready for use on the current stream.
    #[getter]
    fn tensor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(tensor) = self.tensor.find(py, |()| Ok(true))? {
            return Ok(tensor);
        }
        let tensor = self.make.bind(py).call0()?;
        self.tensor.add((), &tensor)?;
        Ok(tensor)
    }

    // No `__clear__`: tensors refer to nothing here.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.make)?;
        self.tensor.traverse(&visit)
    }
}
