//! Backward phases of one call: its taps on autograd's graph, and the walks of the hooks, on the
//! thread on which autograd runs them.

use ferrohook_core::{Inside, Phase};
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::contexts::current::Frames;
use crate::contexts::frame::only_open;
use crate::contexts::owners::{Firing, Owned};
use crate::contexts::regions::Regions;
use crate::cpython::invoke;
use crate::cpython::once::Once;
use crate::hooks::native::Turn;
use crate::hooks::site::Site;
use crate::registry::Registry;
use crate::torch;
use crate::torch::hooks::TorchBackward;

/// Positional and keyword arguments of a call.
pub type Arguments<'py> = (Bound<'py, PyTuple>, Bound<'py, PyDict>);

/// Taps of one call on autograd's graph.
pub struct Tap<'py> {
    /// The call's `ferrohook.attach.backward.BackwardPass`.
    full: Option<Bound<'py, PyAny>>,
    /// Torch's hooks of the deprecated kind.
    non_full: Vec<Bound<'py, PyAny>>,
}

impl<'py> Tap<'py> {
    /// Makes the taps; None if the call has no backward hooks or records no gradients. `fires`: the
    /// registry has hooks of `backward_pre`, of `backward`.
    pub fn new(
        module: &Bound<'py, PyAny>,
        registry: &Bound<'py, Registry>,
        frames: &Frames<'py>,
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
                // A repeat takes the forward's frames, even if some closed since.
                let repeats = Regions::current(py)?.is_some_and(|it| it.get().repeating());
                let open = |it| {
                    if repeats {
                        Ok(Bound::clone(it))
                    } else {
                        only_open(it)
                    }
                };
                let entered = frames.entered(py)?.map(open).transpose()?;
                let walk = BackwardWalk {
                    registry: registry.clone().unbind(),
                    frames: entered.unwrap_or_else(|| PyTuple::empty(py)).unbind(),
                    phase,
                };
                hooks.push(Bound::new(py, walk)?.into_any());
            }
        }
        let mut pass = None;
        if !(pre.is_empty() && full.is_empty()) && torch::is_grad_enabled(py)? {
            static CLASS: Once<Py<PyAny>> = Once::new();
            let class = CLASS.import(py, "ferrohook.attach.backward", "BackwardPass")?;
            pass = Some(class.call1((module, pre, full))?);
        }
        let wanted = pass.is_some() || !non_full.is_empty();
        Ok(wanted.then_some(Self {
            full: pass,
            non_full,
        }))
    }

    /// Taps the gradients of the arguments; None if no full backward hook wants them.
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

    /// Taps the gradient of the output.
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
            let backward = module.py().import("ferrohook.attach.backward")?;
            backward.call_method1("hook_non_full", (module, &self.non_full, args, &output))?;
        }
        Ok(output)
    }
}

/// Hooks of one phase as a single hook of torch's, for a call made in `frames`.
#[pyclass(frozen)]
pub struct BackwardWalk {
    registry: Py<Registry>,
    frames: Py<PyTuple>,
    phase: Phase,
}

#[pymethods]
impl BackwardWalk {
    /// Returns the gradients after the hooks; None if none replaced them.
    #[pyo3(signature = (module, grads, grad_output = None))]
    fn __call__<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        grads: &Bound<'py, PyAny>,
        grad_output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = module.py();
        let registry = self.registry.get();
        let frames = Frames::fixed(self.frames.bind(py).clone());
        let firing = registry.begin(py, self.phase, &frames)?;
        let mut replaced = None;
        let inside = Inside::here();
        for hook in firing.iter().flat_map(Firing::iter) {
            let Some(invocation) = hook.enter(&inside) else {
                continue;
            };
            let entry = hook.entry;
            let site = Site { entry, module };
            let current = replaced.as_ref().unwrap_or(grads);
            let result = run_hook(hook, &site, current, grad_output);
            drop(invocation);
            match result {
                Ok(None) => {}
                Ok(new) => replaced = new,
                Err(error) => registry.apply_on_error(&site, hook.owner, error)?,
            }
        }
        Ok(replaced)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.registry)?;
        visit.call(&self.frames)
    }
}

/// Runs one hook, which may replace `grads`: the gradient of the output for `backward_pre`, of the
/// input for `backward`. `grad_output`: gradient of the output, which hooks of `backward` get too.
fn run_hook<'py>(
    owned: Owned<'_, 'py>,
    site: &Site<'_, 'py>,
    grads: &Bound<'py, PyAny>,
    grad_output: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (py, hook) = (site.module.py(), site.entry.hook());
    if let Some(as_native) = hook.as_native() {
        let turn = Turn {
            phase: site.entry.phase(),
            module: site.module,
            args: &PyTuple::empty(py),
            kwargs: None,
            value: grads,
            grad_output,
            again: None,
            took: None,
            owner: owned.object(),
            part: None,
            describe: &|| site.describe(),
        };
        let object = hook.target().bind(py);
        return as_native(object)?.run(object, &turn);
    }
    let callback = hook.object().bind(py);
    let result = match grad_output {
        Some(grad_output) => invoke::call(callback, [site.module, grads, grad_output]),
        None => invoke::call(callback, [site.module, grads]),
    }?;
    checked(result, grads, grad_output.is_some())
}

/// Validates the gradients that a plain hook returned; `full`: a hook of `backward`.
fn checked<'py>(
    result: Bound<'py, PyAny>,
    grads: &Bound<'py, PyAny>,
    full: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    if result.is_none() {
        return Ok(None);
    }
    // PyTorch's signature allows a lone tensor; `len` would return the size of its first dimension.
    let result = if torch::is_tensor(&result)? {
        PyTuple::new(result.py(), [result])?.into_any()
    } else {
        result
    };
    let (got, expected) = (result.len()?, grads.len()?);
    if got == expected {
        return Ok(Some(result));
    }
    let (hook, what) = if full {
        ("Backward hook", "grad_input")
    } else {
        ("Backward pre hook", "grad_output")
    };
    Err(PyRuntimeError::new_err(format!(
        "{hook} returned an invalid number of {what}, got {got}, but expected {expected}"
    )))
}
