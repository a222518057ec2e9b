//! Tensors of the host, and their copies on the devices of others.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::torch::made::MadeTensors;
use crate::torch::tensors::{is_inference, outside_inference, requires_grad};

/// Copies a tensor to a device; one of the host through pinned memory, so that the host does not
/// wait for a GPU. No code may write to it later.
#[pyfunction]
pub fn to_device<'py>(
    tensor: &Bound<'py, PyAny>,
    device: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let to = intern!(py, "to");
    if !leaves_host(tensor, device)? {
        return tensor.call_method1(to, (device,));
    }
    let options = PyDict::new(py);
    options.set_item(intern!(py, "non_blocking"), true)?;
    let pinned = tensor.call_method0(intern!(py, "pin_memory"))?;
    pinned.call_method(to, (device,), Some(&options))
}

/// True for a tensor of the host that goes to a GPU. Not for one whose copy is part of a graph:
/// autograd's, or a CUDA graph, which reads the memory of the host in each replay.
fn leaves_host(tensor: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let goes_to_gpu = device.getattr(intern!(py, "type"))?.eq("cuda")?
        && tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
    if !goes_to_gpu || requires_grad(tensor)? {
        return Ok(false);
    }
    Ok(capturing(py)? == Some(false))
}

/// True while a CUDA graph is captured; None where no GPU is used, shape propagation of tensors that
/// say to be on one included.
pub fn capturing(py: Python<'_>) -> PyResult<Option<bool>> {
    let torch = py.import(intern!(py, "torch"))?;
    let cuda = torch.getattr(intern!(py, "cuda"))?;
    if !cuda
        .call_method0(intern!(py, "is_initialized"))?
        .is_truthy()?
    {
        return Ok(None);
    }
    let capturing = intern!(py, "is_current_stream_capturing");
    cuda.call_method0(capturing)?.is_truthy().map(Some)
}

/// Copies of a tensor of the host, one for each device, made when they are first needed.
#[derive(Default)]
pub struct Copies(MadeTensors<Py<PyAny>>);

impl Copies {
    /// Returns the copy on the device of another tensor. Made outside of inference mode, as a later
    /// call may record a graph.
    pub fn on_device_of<'py>(
        &self,
        other: &Bound<'py, PyAny>,
        make: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let device = other.getattr(intern!(py, "device"))?;
        let known = self.0.find(py, |of| of.bind(py).eq(&device))?;
        if let Some(tensor) = known {
            return Ok(tensor);
        }
        let tensor = outside_inference(py, || {
            let copy = to_device(&make()?, &device)?; // one of the same device is the tensor itself
            if is_inference(&copy)? {
                return copy.call_method0(intern!(py, "clone"));
            }
            Ok(copy)
        })?;
        self.0.add(device.unbind(), &tensor)?;
        Ok(tensor)
    }
}
