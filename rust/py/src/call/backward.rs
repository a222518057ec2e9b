//! The backward phases of one call: its place on autograd's tape, and their walks, on whichever thread
//! autograd runs them.

use ferrohook_core::{Inside, Phase, Snapshot};
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::contexts::current::Scopes;
use crate::cpython::invoke;
use crate::hooks::hook::Hook;
use crate::hooks::native::Turn;
use crate::hooks::site::Site;
use crate::registry::Registry;
use crate::torch;
use crate::torch::hooks::TorchBackward;

/// Arguments of a call: by position and by keyword.
pub type Arguments<'py> = (Bound<'py, PyTuple>, Bound<'py, PyDict>);

/// The place of one call on autograd's tape.
pub struct Tap<'py> {
    /// The call's `ferrohook.backward.BackwardPass`.
    full: Option<Bound<'py, PyAny>>,
    /// Torch's hooks of the deprecated kind.
    non_full: Vec<Bound<'py, PyAny>>,
}

impl<'py> Tap<'py> {
    /// None where the call has no backward hooks, or records no gradients for them. `fires` tells
    /// which of `backward_pre` and `backward` have any in the registry.
    pub fn new(
        module: &Bound<'py, PyAny>,
        registry: &Bound<'py, Registry>,
        scopes: &Scopes<'py>,
        torch_hooks: TorchBackward<'py>,
        fires: [bool; 2],
    ) -> PyResult<Option<Self>> {
        let py = module.py();
        let TorchBackward {
            mut pre,
            mut full,
            non_full,
        } = torch_hooks;
        let phases = [Phase::BackwardPre, Phase::Backward];
        for ((phase, hooks), fires) in phases.into_iter().zip([&mut pre, &mut full]).zip(fires) {
            if fires {
                let entered = scopes.entered(py)?.cloned();
                let walk = BackwardWalk {
                    registry: registry.clone().unbind(),
                    scopes: entered.unwrap_or_else(|| PyTuple::empty(py)).unbind(),
                    phase,
                };
                hooks.push(Bound::new(py, walk)?.into_any());
            }
        }
        let mut pass = None;
        if !(pre.is_empty() && full.is_empty()) && torch::is_grad_enabled(py)? {
            static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let class = CLASS.import(py, "ferrohook.backward", "BackwardPass")?;
            pass = Some(class.call1((module, pre, full))?);
        }
        let wanted = pass.is_some() || !non_full.is_empty();
        Ok(wanted.then_some(Self {
            full: pass,
            non_full,
        }))
    }

    /// The arguments with their gradients observed; None where nobody observes them.
    pub fn input(
        &self,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Option<Arguments<'py>>> {
        let Some(pass) = &self.full else {
            return Ok(None);
        };
        let py = args.py();
        let kwargs = kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
        let tap = pass.getattr(intern!(py, "tap_inputs"))?;
        invoke::call(&tap, [args, &kwargs])?.extract().map(Some)
    }

    /// The output with its gradient observed.
    pub fn output(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        mut output: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(pass) = &self.full {
            let tap = pass.getattr(intern!(output.py(), "tap_outputs"))?;
            output = invoke::call(&tap, [&output])?;
        }
        if !self.non_full.is_empty() {
            torch::hooks::hook_non_full(module, &self.non_full, args, &output)?;
        }
        Ok(output)
    }
}

/// A phase's hooks as one hook of torch's, for a call that was made in `scopes`.
#[pyclass(frozen)]
struct BackwardWalk {
    registry: Py<Registry>,
    scopes: Py<PyTuple>,
    phase: Phase,
}

#[pymethods]
impl BackwardWalk {
    /// The gradients as the hooks leave them, or None where none replaces them.
    #[pyo3(signature = (module, grads, grad_output = None))]
    fn __call__<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        grads: &Bound<'py, PyAny>,
        grad_output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = module.py();
        let registry = self.registry.get();
        let scopes = Scopes::given(self.scopes.bind(py).clone());
        let snapshot = registry.begin(py, self.phase, &scopes)?;
        walk(registry, snapshot, module, grads, grad_output)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.registry)?;
        visit.call(&self.scopes)
    }
}

/// Walks a phase, whose hooks may replace `grads` (the gradient of the output for `backward_pre`, of
/// the input for `backward`); `grad_output` is what the hooks of `backward` see beside it.
fn walk<'py>(
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
            errors: registry.errors(),
        };
        let timer = entry.hook().start();
        let result = invoke(&site, &current, grad_output);
        drop((timer, invocation));
        if let Some(new) = site.apply_on_error(result)? {
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
    let (py, hook) = (site.module.py(), site.entry.hook());
    let callback = hook.object().bind(py);
    if let Some(native) = hook.native() {
        let turn = Turn {
            phase: site.entry.phase(),
            module: site.module,
            args: &PyTuple::empty(py),
            kwargs: None,
            value: grads,
            grad_output,
            took: None,
            describe: &|| site.describe(),
        };
        return native.run(callback, &turn);
    }
    let result = match grad_output {
        Some(grad_output) => invoke::call(callback, [site.module, grads, grad_output]),
        None => invoke::call(callback, [site.module, grads]),
    }?;
    if result.is_none() {
        return Ok(None);
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
