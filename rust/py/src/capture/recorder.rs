//! `Recorder`: the native hook that records the input or the output of a module.

use ferrohook_core::{Entry, Inside, Phase, Snapshot};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::attach::instrumenting::registry_of;
use crate::capture::collector::Collector;
use crate::capture::request::{Place, Source};
use crate::contexts::current::Frames;
use crate::contexts::frame::{self, ScopeArg};
use crate::error;
use crate::hooks::handle::HookHandle;
use crate::hooks::hook::Hook;
use crate::hooks::native::{Native, NativeHook, Outcome, Traced, Turn};
use crate::hooks::options::{OnError, PhaseName, Priority};
use crate::hooks::site::Repeats;

/// Native hook that records the input or the output of a module.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct Recorder {
    source: Source,
    index: usize,
    inputs: bool,
    /// Records `value[part]`, or the attribute of that name; None: the whole value.
    part: Option<Py<PyAny>>,
}

#[pymethods]
impl Recorder {
    #[new]
    #[pyo3(signature = (collector, index, inputs, part, place = None))]
    pub fn new(
        collector: Py<Collector>,
        index: usize,
        inputs: bool,
        part: Option<Py<PyAny>>,
        place: Option<Place>,
    ) -> PyResult<(Self, NativeHook)> {
        if index >= collector.get().names().len() {
            return Err(PyValueError::new_err("the collector has no such name"));
        }
        let recorder = Self {
            source: Source { collector, place },
            index,
            inputs,
            part,
        };
        Ok((recorder, NativeHook::of::<Self>()))
    }

    /// Phase that it is registered for.
    #[getter(phase)]
    fn phase_name(&self) -> &'static str {
        self.only_phase().name()
    }

    fn __repr__(&self) -> String {
        format!("capture of {:?}", self.name())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.source.traverse(&visit)?;
        visit.call(&self.part)
    }
}

impl Native for Recorder {
    fn phase(slf: &Bound<'_, Self>) -> Option<Phase> {
        Some(slf.get().only_phase())
    }

    fn run<'py>(slf: &Bound<'py, Self>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        slf.get().record(turn)?;
        Ok(None)
    }

    /// Traces the recorded part, which is the same for every capture.
    fn traced<'py>(slf: &Bound<'py, Self>, _phase: Phase) -> PyResult<Option<Traced<'py>>> {
        let (py, this) = (slf.py(), slf.get());
        let part = this.part.as_ref().map(|part| part.bind(py).clone());
        Ok(Some(Traced {
            callback: part.unwrap_or_else(|| py.None().into_bound(py)),
            kind: "recorder",
            with_kwargs: false,
            faithful: this.source.collector.get().records_in_graph(),
        }))
    }
}

impl Recorder {
    fn name(&self) -> &str {
        &self.source.collector.get().names()[self.index]
    }

    pub fn only_phase(&self) -> Phase {
        if self.inputs {
            Phase::ForwardPre
        } else {
            Phase::Forward
        }
    }

    fn record(&self, turn: &Turn<'_, '_>) -> PyResult<()> {
        // Frames are looked up for plans alone.
        let frames = match self.source.place {
            Some(_) => (turn.frames)()?,
            None => None,
        };
        let part;
        let value = match &self.part {
            None => turn.value,
            Some(named) => {
                part = self.part(turn.value, named.bind(turn.value.py()))?;
                &part
            }
        };
        self.source
            .keep(frames.as_ref(), turn.repeat, self.index, value)
    }

    fn part<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        part: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let found = match value.get_item(part) {
            Ok(found) => Ok(found),
            Err(error) => match part.cast::<PyString>() {
                Ok(name) => value.getattr(name).map_err(|_| error),
                Err(_) => Err(error),
            },
        };
        found.map_err(|cause| {
            let error = error::selection_error(
                value.py(),
                format!(
                    "{:?} has no output_index {}: it is of type {}",
                    self.name(),
                    part.repr()
                        .map_or_else(|_| "?".to_owned(), |repr| repr.to_string()),
                    error::type_name(value)
                ),
            );
            error.set_cause(value.py(), Some(cause));
            error
        })
    }
}

/// Records a value in a compiled region, by the recorder at `position` among those that fire in
/// this context for the module with this registry id.
#[pyfunction]
pub fn record(
    py: Python<'_>,
    module: u64,
    phase: PhaseName,
    position: usize,
    value: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let frames = Frames::default();
    let Some(frames) = frames.entered(py)? else {
        return Ok(());
    };
    let snapshots: Vec<_> = frame::hooks(frames, module)
        .map(|hooks| hooks.snapshot(phase.0))
        .collect();
    let merged = Snapshot::merged(&snapshots);
    let recorder = |entry| {
        let recorder = Entry::<Hook>::hook(entry)
            .object()
            .bind(py)
            .cast::<Recorder>();
        let fires = entry.enabled() && !entry.removed();
        recorder
            .ok()
            .filter(|_| fires)
            .map(|recorder| (entry, recorder))
    };
    let repeats = Repeats::default();
    let with_repeat = |(entry, recorder)| (entry, recorder, repeats.of(entry));
    let mut recorders = merged.iter().filter_map(recorder).map(with_repeat);
    if let Some((entry, recorder, repeat)) = recorders.nth(position)
        && let Some(_invocation) = entry.enter(&Inside::here())
    {
        let recorder = recorder.get();
        return recorder
            .source
            .keep(Some(frames), repeat, recorder.index, value);
    }
    Ok(())
}

/// Registers recorders of the inputs (`inputs`) or outputs of instrumented modules, or of the
/// `part` of them, under the collector's names, in order.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         recorded.
#[pyfunction]
#[pyo3(signature = (collector, modules, priority, scope, inputs = false, part = None, place = None))]
pub fn record_all(
    collector: &Bound<'_, Collector>,
    modules: Vec<Bound<'_, PyAny>>,
    priority: Priority,
    scope: ScopeArg<'_>,
    inputs: bool,
    part: Option<&Bound<'_, PyAny>>,
    place: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<HookHandle>> {
    let record = |(index, module): (usize, &Bound<'_, PyAny>)| {
        let part = part.cloned().map(Bound::unbind);
        let place = place.as_ref().map(PyAnyMethods::extract).transpose()?;
        let recorder = Recorder::new(collector.clone().unbind(), index, inputs, part, place)?;
        let recorder = Bound::new(module.py(), recorder)?;
        let (phase, options) = (recorder.get().only_phase(), OnError::Raise.into());
        let placement = priority.place(false);
        let registry = registry_of(module)?;
        let registry = registry.get();
        registry.register(phase, recorder.as_any(), placement, options, Some(&scope))
    };
    modules.iter().enumerate().map(record).collect()
}
