//! Transforms of `torch.func`, whose tensors wrap others.

use pyo3::intern;
use pyo3::prelude::*;

use crate::cpython::once::Once;

/// True while this thread runs a transform.
pub fn active(py: Python<'_>) -> PyResult<bool> {
    static LEVEL: Once<Py<PyAny>> = Once::new();
    let level = LEVEL.import(py, "torch._C._functorch", "maybe_current_level")?;
    Ok(!level.call0()?.is_none())
}

/// Returns the tensor with the memory of one that transforms wrap.
pub fn physical<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let tensors = py.import(intern!(py, "ferrohook.util.tensors"))?;
    tensors.call_method1(intern!(py, "physical"), (tensor,))
}

/// Returns a gradient outside of the batch in which autograd computes it, with that dimension first.
pub fn unbatched(tensor: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    static BATCHED: Once<Py<PyAny>> = Once::new();
    let py = tensor.py();
    let batched = BATCHED.import(py, "torch._C._functorch", "is_legacy_batchedtensor")?;
    if !batched.call1((&tensor,))?.is_truthy()? {
        return Ok(tensor);
    }
    let tensors = py.import(intern!(py, "ferrohook.util.tensors"))?;
    tensors.call_method1(intern!(py, "unbatched"), (tensor,))
}
