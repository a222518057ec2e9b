//! Registering with many modules at once, for what does so before each call of a model.

use ferrohook_core::Phase;
use pyo3::intern;
use pyo3::prelude::*;

use crate::dispatcher::Dispatcher;
use crate::error::hook_error;
use crate::handle::HookHandle;
use crate::hook::{OnError, PhaseName, Priority};
use crate::point::PointHook;
use crate::recorder::{Collector, Recorder};
use crate::scope::ScopeArg;
use crate::torch;

/// Has the outputs of instrumented modules recorded under the collector's names, in order.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         recorded.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what pyo3 takes from Python")]
pub fn record_all(
    collector: &Bound<'_, Collector>,
    modules: Vec<Bound<'_, PyAny>>,
    priority: Priority,
    scope: ScopeArg<'_>,
) -> PyResult<()> {
    for (index, module) in modules.iter().enumerate() {
        let recorder = Recorder::of_outputs(collector, index)?;
        let recorder = Bound::new(module.py(), recorder)?;
        register(module, recorder.as_any(), Phase::Forward, priority, &scope)?;
    }
    Ok(())
}

/// Registers hooks of hook points, (point, hook) each, for one phase and scope.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         registered.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what pyo3 takes from Python")]
pub fn register_all(
    py: Python<'_>,
    hooks: Vec<(Bound<'_, PyAny>, Bound<'_, PointHook>)>,
    phase: PhaseName,
    scope: ScopeArg<'_>,
) -> PyResult<()> {
    for (point, hook) in &hooks {
        let handle = register(point, hook.as_any(), phase.0, Priority(0), &scope)?;
        hook.get().registered(Py::new(py, handle)?);
    }
    Ok(())
}

fn register(
    module: &Bound<'_, PyAny>,
    hook: &Bound<'_, PyAny>,
    phase: Phase,
    priority: Priority,
    scope: &ScopeArg<'_>,
) -> PyResult<HookHandle> {
    let py = module.py();
    let state = torch::instance_dict(module)?;
    let Some(dispatcher) = state.get_item(intern!(py, Dispatcher::KEY))? else {
        return Err(hook_error(py, "a module is not instrumented".to_owned()));
    };
    let dispatcher = dispatcher.cast::<Dispatcher>()?;
    dispatcher.get().registry(py).get().register(
        phase,
        hook,
        priority.place(false),
        OnError::Raise.into(),
        Some(scope),
    )
}
