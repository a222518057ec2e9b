//! `Recorder`: the native hook that records the input or the output of a module.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrohook_core::{Inside, Phase};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString, PyTuple};

use crate::attach::instrumenting::register_each;
use crate::capture::collector::Collector;
use crate::capture::keeping::{self, KeepAgain};
use crate::capture::request::{CapturePlace, Source, Stored};
use crate::contexts::current::Frames;
use crate::contexts::frame::{self, Frame, ScopeArg};
use crate::contexts::owners::Firing;
use crate::contexts::regions::Regions;
use crate::error;
use crate::hooks::handle::HookHandle;
use crate::hooks::native::{Again, NativeHook, Turn};
use crate::hooks::options::{OnError, PhaseName, Priority};
use crate::registry::Audience;
use crate::rows::places::{OF_REQUEST, Position, TokenPositions};
use crate::torch::tensors::part_of;

/// Native hook that records the input or the output of a module.
#[pyclass(frozen, extends = NativeHook, module = "ferrohook._core")]
pub struct Recorder {
    pub source: Source,
    pub index: usize,
    pub inputs: bool,
    /// Records `value[part]`, or the attribute of that name; None: the whole value.
    pub part: Option<Py<PyAny>>,
    /// Its position in the order of hooks; None: after all of them.
    pub place: Option<u64>,
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
        place: Option<CapturePlace>,
    ) -> PyResult<(Self, NativeHook)> {
        if index >= collector.get().names().len() {
            return Err(PyValueError::new_err("the collector has no such name"));
        }
        let recorder = Self {
            source: Source {
                collector,
                place: place.unwrap_or_default(),
            },
            index,
            inputs,
            part,
            place: None,
        };
        Ok((recorder, NativeHook::of::<Self>()))
    }

    /// Phase that it is registered for.
    #[getter(phase)]
    fn phase_name(&self) -> &'static str {
        Self::phase_of(self.inputs).name()
    }

    fn __repr__(&self) -> &'static str {
        if self.inputs {
            "capture of the inputs"
        } else {
            "capture"
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.source.traverse(&visit)?;
        visit.call(&self.part)
    }
}

impl Recorder {
    fn name(&self) -> &str {
        &self.source.collector.get().names()[self.index]
    }

    pub fn phase_of(inputs: bool) -> Phase {
        if inputs {
            Phase::ForwardPre
        } else {
            Phase::Forward
        }
    }

    /// Returns the key of the operator for the recorded part: the same only for equal parts, recorded
    /// after all hooks.
    pub fn key(&self, py: Python<'_>) -> PyResult<String> {
        let key = self.key_of_part(py)?;
        Ok(match self.place {
            Some(place) => format!("{key} at place {place}"),
            None => key,
        })
    }

    fn key_of_part(&self, py: Python<'_>) -> PyResult<String> {
        let Some(part) = &self.part else {
            return Ok(String::new());
        };
        let part = part.bind(py);
        let plain = |step: &Bound<'_, PyAny>| {
            step.is_exact_instance_of::<PyString>() || step.is_exact_instance_of::<PyInt>()
        };
        let path = part.cast_exact::<PyTuple>();
        if plain(part) || path.is_ok_and(|path| path.iter().all(|step| plain(&step))) {
            return Ok(part.repr()?.to_string());
        }
        Ok(format!("object at {:p}", part.as_ptr()))
    }

    /// Records the part of a value for an owner; `turn`: of a call that is not compiled. None if nothing
    /// of it is stored.
    pub fn record<'py>(
        &self,
        owner: Option<&Bound<'py, PyAny>>,
        value: &Bound<'py, PyAny>,
        turn: Option<&Turn<'_, 'py>>,
    ) -> PyResult<Option<Stored<'py>>> {
        let part = self.part_of(value)?;
        self.source.keep(owner, self.index, &part, turn)
    }

    /// Returns the action of a repeated checkpointed forward on a stored value; None if it has none.
    pub fn again(&self, stored: Stored<'_>) -> PyResult<Option<Arc<dyn Again>>> {
        let (index, part) = (self.index, self.part.as_ref());
        let again = KeepAgain::of(&stored.collector, index, part, stored.keep, stored.mask)?;
        Ok(again.map(|again| Arc::new(again) as _))
    }

    /// Returns the part of a value that it records.
    pub fn part_of<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Some(part) = &self.part else {
            return Ok(value.clone());
        };
        let part = part.bind(value.py());
        part_of(value, part).map_err(|cause| {
            let message = format!(
                "{} has no output_index {}: it is of type {}",
                error::shown(self.name()),
                error::repr(part),
                error::type_name(value)
            );
            let error = error::selection_error(value.py(), message);
            error::caused(value.py(), error, cause)
        })
    }
}

/// Runs an operator in a compiled region: the recorders with this key that fire in this context for
/// the module with this registry id record a copy of the tensor, as compiled code may reuse it.
/// With `whole` the value is the module's, and is recorded as in an eager call.
#[pyfunction]
#[pyo3(signature = (module, phase, key, value, *, whole = false))]
pub fn record(
    py: Python<'_>,
    module: u64,
    phase: PhaseName,
    key: &str,
    value: &Bound<'_, PyAny>,
    whole: bool,
) -> PyResult<()> {
    let frames = Frames::default();
    let Some(frames) = frames.entered(py)? else {
        return Ok(());
    };
    let regions = Regions::current(py)?;
    // A repeat of a checkpointed forward captures nothing for those whose forward it was.
    let repeats = |owner: &Frame| regions.as_ref().is_some_and(|it| it.get().repeats(owner));
    let hooks = frame::hooks(frames, module, phase.0);
    let firing = Firing::merged(hooks.filter(|(owner, _)| !repeats(owner.get())), None);
    let inside = Inside::here();
    for hook in firing.iter().flat_map(Firing::iter) {
        let object = hook.entry.hook().object().bind(py);
        if let Ok(recorder) = object.cast::<Recorder>()
            && recorder.get().key(py)? == key
            && let Some(_invocation) = hook.enter(&inside)
        {
            let recorder = recorder.get();
            if whole {
                recorder.record(hook.object(), value, None)?;
                continue;
            }
            let detached = value.call_method0(intern!(py, "detach"))?;
            let copy = detached.call_method0(intern!(py, "clone"))?;
            let source = &recorder.source;
            source.keep(hook.object(), recorder.index, &copy, None)?;
        }
    }
    Ok(())
}

/// Stores values of a request that were computed outside of recorders, by their places in the
/// collector: tensors with a row for each token, with the positions of the tokens, their rows in the
/// request and the id of their sequences. `repeats`: whether a token may stand there several times.
///
/// Raises:
///     CaptureBudgetError: it would exceed `max_bytes`.
#[pyfunction]
#[pyo3(signature = (collector, values, positions, rows = None, sequences = OF_REQUEST, *, repeats = false))]
pub fn store_rows(
    collector: &Bound<'_, Collector>,
    values: Vec<(usize, Bound<'_, PyAny>)>,
    positions: Option<Vec<i64>>,
    rows: Option<Vec<usize>>,
    sequences: u64,
    repeats: bool,
) -> PyResult<()> {
    let of_rows = |values: Vec<i64>| TokenPositions {
        rows: rows.map(Into::into),
        // Tokens of one position are told apart by their numbers.
        numbers: repeats.then(|| std::iter::repeat_n(0, values.len()).collect()),
        sequences,
        ..TokenPositions::of_rows(values.into_iter().map(Position).collect(), 0)
    };
    let positions = positions.map(of_rows);
    values.iter().try_for_each(|(index, value)| {
        keeping::record(collector, *index, value, positions.clone(), true).map(drop)
    })
}

/// Registers recorders of the inputs (`inputs`) or outputs of instrumented modules, or of the
/// `part` of them, under the collector's names: those with these indices, or all in order.
///
/// Raises:
///     HookError: a module is not instrumented, or the scope was left; those before it are
///         recorded.
#[pyfunction]
#[pyo3(signature = (collector, modules, priority, scope, inputs = false, part = None, place = None, indices = None))]
#[expect(clippy::too_many_arguments, reason = "the options, by keyword")]
pub fn record_all(
    collector: &Bound<'_, Collector>,
    modules: Vec<Bound<'_, PyAny>>,
    priority: Priority,
    scope: ScopeArg<'_>,
    inputs: bool,
    part: Option<&Bound<'_, PyAny>>,
    place: Option<Bound<'_, PyAny>>,
    indices: Option<Vec<usize>>,
) -> PyResult<Vec<Py<HookHandle>>> {
    static PLACES: AtomicU64 = AtomicU64::new(0);
    let py = collector.py();
    let phase = Recorder::phase_of(inputs);
    let (placement, options) = (priority.place(false), OnError::Raise.into());
    let behind_all = priority.0 == i64::MIN;
    // Relaxed: the numbers order nothing.
    let own_place = (!behind_all).then(|| PLACES.fetch_add(1, Ordering::Relaxed));
    let indices = indices.unwrap_or_else(|| (0..modules.len()).collect());
    let hooks = indices.into_iter().zip(modules).map(|(index, module)| {
        let part = part.cloned().map(Bound::unbind);
        let place = place.as_ref().map(PyAnyMethods::extract).transpose()?;
        let mut recorder = Recorder::new(collector.clone().unbind(), index, inputs, part, place)?;
        recorder.0.place = own_place;
        let name = recorder.0.name().to_owned();
        Ok((module, Bound::new(py, recorder)?.into_any(), Some(name)))
    });
    let audience = Audience::of_caller(py, Some(&scope))?;
    register_each(hooks, phase, placement, options, audience).collect()
}
