//! The walk of a backward phase, on whichever thread autograd runs it.

use ferrohook_core::{Inside, Snapshot};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::cpython::invoke;
use crate::hooks::hook::{Callback, Hook, Site};
use crate::native::detectors::Seen;
use crate::registry::Registry;
use crate::torch;

/// Walks a phase, whose hooks may replace `grads` (the gradient of the output for `backward_pre`, of
/// the input for `backward`); `grad_output` is what the hooks of `backward` see beside it.
pub fn run<'py>(
    registry: &Registry,
    snapshot: Option<Snapshot<Hook>>,
    module: &Bound<'py, PyAny>,
    grads: &Bound<'py, PyAny>,
    grad_output: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let mut current = grads.clone();
    let mut replaced = false;
    let inside = Inside::here();
    for entry in snapshot.iter().flat_map(Snapshot::iter) {
        let Some(invocation) = entry.enter(&inside) else {
            continue;
        };
        let site = Site {
            entry,
            module,
            registry,
        };
        let timer = entry.hook().start();
        let result = invoke(&site, &current, grad_output);
        drop((timer, invocation));
        if let Some(new) = site.settle(result)? {
            current = new;
            replaced = true;
        }
    }
    Ok(replaced.then_some(current))
}

fn invoke<'py>(
    site: &Site<'_, 'py>,
    grads: &Bound<'py, PyAny>,
    grad_output: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (callback, typed) = match site.entry.hook().callback(site.module.py()) {
        Callback::Plain(callback) => (callback, false),
        Callback::Typed(callback) => (callback, true),
        Callback::Recorder(_) | Callback::Point(_) => return Ok(None), // of other phases
        Callback::Detector(detector) => {
            let (value, took) = (grads, None);
            detector.get().observe(&Seen { value, took })?;
            return Ok(None);
        }
    };
    let result = match grad_output {
        Some(grad_output) if typed => invoke::call(callback, [grads, grad_output]),
        Some(grad_output) => invoke::call(callback, [site.module, grads, grad_output]),
        None => invoke::call(callback, [site.module, grads]),
    }?;
    if result.is_none() {
        return Ok(None);
    }
    if typed {
        return Err(site.type_error("observes and returns None", &result));
    }
    // PyTorch's signature allows a lone tensor; its length would be that of its first dimension.
    let result = if torch::is_tensor(&result)? {
        PyTuple::new(result.py(), [result])?.into_any()
    } else {
        result
    };
    let (given, expected) = (result.len()?, grads.len()?);
    if given == expected {
        return Ok(Some(result));
    }
    let (hook, what) = match grad_output {
        None => ("Backward pre hook", "grad_output"),
        Some(_) => ("Backward hook", "grad_input"),
    };
    Err(PyRuntimeError::new_err(format!(
        "{hook} returned an invalid number of {what}, got {given}, but expected {expected}"
    )))
}
