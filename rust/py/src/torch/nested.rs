//! Nested tensors, whose components differ in size.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyList};

/// True for a nested tensor.
pub fn is_nested(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    tensor.getattr(intern!(py, "is_nested"))?.is_truthy()
}

/// Changes a nested tensor by a function of dense tensors, (tokens, ...).
pub fn map_dense<'py>(
    nested: &Bound<'py, PyAny>,
    change: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = nested.py();
    let torch = py.import(intern!(py, "torch"))?;
    let made = torch.getattr(intern!(py, "nested"))?;
    let jagged = torch.getattr(intern!(py, "jagged"))?;
    if !nested.getattr(intern!(py, "layout"))?.is(&jagged) {
        let changed = PyList::empty(py);
        for component in nested.call_method0(intern!(py, "unbind"))?.try_iter()? {
            changed.append(change(&component?)?)?;
        }
        let layout = [("layout", torch.getattr(intern!(py, "strided"))?)].into_py_dict(py)?;
        return made.call_method(intern!(py, "as_nested_tensor"), (changed,), Some(&layout));
    }
    let ragged: usize = nested.getattr(intern!(py, "_ragged_idx"))?.extract()?;
    if ragged != 1 {
        let message = "the tokens of a nested tensor must be in dimension 1";
        return Err(PyTypeError::new_err(message));
    }
    // With its own offsets, so that it still fits others of the same sequences.
    let dense = change(&nested.call_method0(intern!(py, "values"))?)?;
    let offsets = nested.call_method0(intern!(py, "offsets"))?;
    let lengths = nested.call_method0(intern!(py, "lengths"))?;
    made.call_method1(
        intern!(py, "nested_tensor_from_jagged"),
        (dense, offsets, lengths),
    )
}
