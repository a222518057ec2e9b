//! Registering many recorders at once, for what does so before each call of a model.

use ferrohook_core::Phase;
use pyo3::intern;
use pyo3::prelude::*;

use crate::dispatcher::Dispatcher;
use crate::error::hook_error;
use crate::hook::{OnError, Priority};
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
    let py = collector.py();
    let placement = priority.place(false);
    for (index, module) in modules.iter().enumerate() {
        let state = torch::instance_dict(module)?;
        let Some(dispatcher) = state.get_item(intern!(py, Dispatcher::KEY))? else {
            return Err(hook_error(py, "a module is not instrumented".to_owned()));
        };
        let dispatcher = dispatcher.cast::<Dispatcher>()?;
        let recorder = Recorder::of_outputs(collector, index)?;
        let recorder = Bound::new(py, recorder)?;
        dispatcher.get().registry(py).get().register(
            Phase::Forward,
            recorder.as_any(),
            placement,
            OnError::Raise.into(),
            Some(&scope),
        )?;
    }
    Ok(())
}
