//! Registering with many modules at once, for what does so before each call of a model.

use ferrohook_core::Phase;
use pyo3::intern;
use pyo3::prelude::*;

use crate::attach::wrapper::HookedBase;
use crate::capture::recorder::{Collector, Recorder};
use crate::contexts::scope::ScopeArg;
use crate::dict::instance_dict;
use crate::dispatcher::Dispatcher;
use crate::error::{hook_error, type_name};
use crate::hooks::handle::HookHandle;
use crate::hooks::hook::{OnError, PhaseName, Priority};
use crate::native::point::PointHook;

/// Has what instrumented modules take (`inputs`) or return, or the `part` of it, recorded under the
/// collector's names, in order.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         recorded.
#[pyfunction]
#[pyo3(signature = (collector, modules, priority, scope, inputs = false, part = None))]
#[expect(clippy::needless_pass_by_value, reason = "what pyo3 takes from Python")]
pub fn record_all(
    collector: &Bound<'_, Collector>,
    modules: Vec<Bound<'_, PyAny>>,
    priority: Priority,
    scope: ScopeArg<'_>,
    inputs: bool,
    part: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<HookHandle>> {
    let record = |(index, module): (usize, &Bound<'_, PyAny>)| {
        let part = part.cloned().map(Bound::unbind);
        let recorder = Recorder::new(collector.clone().unbind(), index, inputs, part)?;
        let phase = recorder.phase();
        let recorder = Bound::new(module.py(), recorder)?;
        register(module, recorder.as_any(), phase, priority, &scope)
    };
    modules.iter().enumerate().map(record).collect()
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
    let state;
    let dispatcher;
    let registry = if let Ok(wrapper) = module.cast::<HookedBase>() {
        wrapper.get().registry(py)?
    } else {
        state = instance_dict(module)?;
        let Some(found) = state.get_item(intern!(py, Dispatcher::KEY))? else {
            return Err(hook_error(
                py,
                format!(
                    "this {} is no longer instrumented: its hooks were removed",
                    type_name(module)
                ),
            ));
        };
        dispatcher = found.cast_into::<Dispatcher>()?;
        dispatcher.get().registry(py)
    };
    let (placement, options) = (priority.place(false), OnError::Raise.into());
    let registry = registry.get();
    registry.register(phase, hook, placement, options, Some(scope))
}
