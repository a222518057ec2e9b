//! Tensors that autograd has saved for the backward of an operation.

use pyo3::intern;
use pyo3::prelude::*;
use rustc_hash::FxHashSet;

use crate::torch::facts::Facts;
use crate::torch::tensors::{any_tensor, tensors_of};

/// True if the operation that made a tensor, or the one that it is a view of, has saved it.
pub fn is_saved(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let base = tensor.getattr(intern!(py, "_base"))?;
    for made in [tensor, &base] {
        if !made.is_none() && saves(&made.getattr(intern!(py, "grad_fn"))?, tensor)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if an operation between the arguments and the output of a call has saved a tensor.
pub fn is_saved_between(
    arguments: &Bound<'_, PyAny>,
    output: &Bound<'_, PyAny>,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let py = tensor.py();
    let nodes_of = |structure| {
        let tensors = tensors_of(structure)?.into_iter();
        let nodes = tensors.map(|tensor| tensor.getattr(intern!(py, "grad_fn")));
        nodes.collect::<PyResult<Vec<_>>>()
    };
    // Kept, so that no other node gets the address of one.
    let mut seen = nodes_of(arguments)?;
    let mut addresses: FxHashSet<usize> = seen.iter().map(|it| it.as_ptr() as usize).collect();
    let mut left = nodes_of(output)?;
    while let Some(node) = left.pop() {
        if node.is_none() || !addresses.insert(node.as_ptr() as usize) {
            continue;
        }
        if saves(&node, tensor)? {
            return Ok(true);
        }
        for next in node.getattr(intern!(py, "next_functions"))?.try_iter()? {
            left.push(next?.get_item(0)?);
        }
        seen.push(node);
    }
    Ok(false)
}

/// True if a node of a graph has saved a tensor with the memory of this one.
fn saves(node: &Bound<'_, PyAny>, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    if node.is_none() {
        return Ok(false);
    }
    let address = Facts::address_of_storage(tensor)?;
    for name in node.dir()? {
        let name: String = name.extract()?;
        if !name.starts_with("_saved_") && name != "saved_tensors" {
            continue;
        }
        // Where they were freed there is no backward.
        let Ok(saved) = node.getattr(&*name) else {
            continue;
        };
        let mut same = |each: &Bound<'_, PyAny>| {
            Ok(address.is_some() && Facts::address_of_storage(each)? == address)
        };
        if any_tensor(&saved, &mut same)? {
            return Ok(true);
        }
    }
    Ok(false)
}
