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
