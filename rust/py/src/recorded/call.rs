//! `RecordedCall`: an in-flight call of a model, and the outputs that it records.

use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyDict, PyList, PySet, PyString, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::contexts::current::{self, Frames};
use crate::contexts::frame::{self, Frame};
use crate::cpython::once::Once;
use crate::error;
use crate::recorded::installation::InstallationBase;
use crate::torch;

/// Key that a layer is recorded under, see `recording/declarations.py`.
#[derive(FromPyObject)]
pub struct LayerKey {
    key: Py<PyString>,
    item: isize,
    initial: Option<bool>,
    pub convert: Option<Py<PyAny>>,
}

/// In-flight call of a model: a context manager around its forward.
///
/// Entered, it is the tag of a frame of its context; the innermost call of a context records.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct RecordedCall {
    /// The model.
    #[pyo3(get)]
    model: Py<PyAny>,
    /// Installation of the model; None if it never recorded.
    #[pyo3(get)]
    installation: Option<Py<InstallationBase>>,
    /// The enclosing call, which does not record while this one is in flight.
    #[pyo3(get)]
    around: Option<Py<RecordedCall>>,
    /// Indices of the hidden states that are stored; None for all.
    selected: Option<Vec<usize>>,
    /// True if it records anything.
    #[pyo3(get)]
    records: bool,
    /// Threads that run no layers for it: they existed before and did not make the call.
    #[pyo3(get)]
    other_threads: Py<PyAny>,
    /// Classes of layers that ran, were not attributed and may be this call's.
    #[pyo3(get)]
    unattributed: Py<PySet>,
    /// None once the call has ended.
    progress: Mutex<Option<Progress>>,
}

struct Progress {
    /// Positional and keyword arguments of the call.
    arguments: Py<PyTuple>,
    /// For each requested key a list of the values, in the order of the layers' calls.
    recorded: Py<PyDict>,
    /// Main outputs of the layers.
    outputs: Vec<Py<PyWeakrefReference>>,
    /// Restores the context's frames.
    token: Option<Py<PyAny>>,
}

#[pymethods]
impl RecordedCall {
    #[new]
    fn new(
        py: Python<'_>,
        model: Py<PyAny>,
        installation: Option<Py<InstallationBase>>,
        recorded: Bound<'_, PyDict>,
        selected: Option<Vec<usize>>,
        arguments: Py<PyTuple>,
        other_threads: Py<PyAny>,
    ) -> PyResult<Self> {
        let records = !recorded.is_empty();
        let progress = Progress {
            arguments,
            recorded: recorded.unbind(),
            outputs: Vec::new(),
            token: None,
        };
        Ok(Self {
            model,
            installation,
            around: innermost(py)?.map(Bound::unbind),
            selected,
            records,
            other_threads,
            unattributed: PySet::empty(py)?.unbind(),
            progress: Mutex::new(Some(progress)),
        })
    }

    /// Begins the call. Returns False, and it has ended, if its installation was released
    /// meanwhile.
    // Native, as is `__exit__`: Ctrl-C may interrupt only Python functions.
    fn __enter__(slf: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, this) = (slf.py(), slf.get());
        if this.recorder().is_some_and(|recorder| !recorder.begin()) {
            let _ended = this.progress.lock().take();
            return Ok(false);
        }
        let enter = || {
            in_progress(py)?.add(slf)?;
            let frame = Frame::new(Some(slf.clone().into_any().unbind()));
            current::enter(Bound::new(py, frame)?.as_any())
        };
        let entered = enter().inspect_err(|_| drop(Self::end(slf)))?;
        if let Some(progress) = &mut *this.progress.lock() {
            progress.token = Some(entered.token);
        }
        Ok(true)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        Self::end(slf)
    }

    /// Lists its arguments, and the layers' outputs that are alive.
    fn known<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let progress = self.progress.lock();
        let arguments = progress.iter().map(|it| it.arguments.bind(py).as_any());
        let outputs = progress.iter().flat_map(|it| &it.outputs);
        let alive = outputs.filter_map(|output| output.bind(py).upgrade());
        arguments.cloned().chain(alive).collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.model)?;
        visit.call(&self.installation)?;
        visit.call(&self.around)?;
        visit.call(&self.other_threads)?;
        if let Some(progress) = &*self.progress.lock() {
            visit.call(&progress.arguments)?;
            visit.call(&progress.recorded)?;
        }
        Ok(())
    }

    fn __clear__(&self) {
        // Dropped after the lock is released: destructors of tensors run code.
        let _progress = self.progress.lock().take();
    }
}

impl RecordedCall {
    /// True if this is the installation of its model.
    pub fn uses(&self, installation: &Py<InstallationBase>) -> bool {
        let own = self.installation.as_ref();
        own.is_some_and(|own| own.is(installation))
    }

    /// Records a layer's output under each of its keys.
    pub fn record<'py>(
        &self,
        keys: &[LayerKey],
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = output.py();
        let recorded = match &*self.progress.lock() {
            Some(progress) => progress.recorded.bind(py).clone(),
            None => return Ok(()),
        };
        for key in keys {
            let Some(values) = recorded.get_item(&key.key)? else {
                continue;
            };
            let values = values.cast_into::<PyList>()?;
            // Layers that run at once make one initial state.
            with_critical_section(&values, || {
                if key.initial == Some(true) && values.is_empty() {
                    self.append(&values, key, first_of(args, kwargs))?;
                }
                let value = key.item_of(output)?;
                if value.is_none() {
                    return Ok(());
                }
                self.append(&values, key, value)
            })?;
        }
        self.note(output)
    }

    /// Stores a value, or None for a hidden state that was not selected.
    fn append<'py>(
        &self,
        values: &Bound<'py, PyList>,
        key: &LayerKey,
        value: Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let selected = self.selected.as_ref().filter(|_| key.initial.is_some());
        if selected.is_some_and(|selected| !selected.contains(&values.len())) {
            return values.append(values.py().None());
        }
        match &key.convert {
            Some(convert) => values.append(convert.bind(values.py()).call1((value,))?),
            None => values.append(value),
        }
    }

    /// Notes a layer's main output, the first item of a tuple, for layers on worker threads.
    fn note(&self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let first = output.cast().ok();
        let first = first.and_then(|tuple: &Bound<'_, PyTuple>| tuple.get_item(0).ok());
        let main = first.as_ref().unwrap_or(output);
        if torch::is_tensor(main)? {
            let reference = PyWeakrefReference::new(main)?.unbind();
            if let Some(progress) = &mut *self.progress.lock() {
                progress.outputs.push(reference);
            }
        }
        Ok(())
    }

    /// The installation, if it records.
    fn recorder(&self) -> Option<&InstallationBase> {
        let installation = self.installation.as_ref().filter(|_| self.records)?;
        Some(installation.get())
    }

    /// Ends the call, once: it records nothing from now on.
    fn end(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let Some(progress) = this.progress.lock().take() else {
            return Ok(());
        };
        let token = progress.token.as_ref();
        let reset = token.map(|token| current::reset(token.bind(py), ELSEWHERE));
        in_progress(py)?.discard(slf)?;
        this.recorder()
            .map_or(Ok(()), |recorder| recorder.end(py))?;
        reset.transpose().map(drop)
    }
}

const ELSEWHERE: &str = "a recorded call ended in another thread or task than it began in";

impl LayerKey {
    /// Picks the recorded item of a layer's output.
    fn item_of<'py>(&self, output: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Ok(tuple) = output.cast::<PyTuple>() else {
            return Ok(output.clone());
        };
        output.get_item(self.item).map_err(|_| {
            let (key, index, len) = (&self.key, self.item, tuple.len());
            let message = format!("\"{key}\" has no output_index {index}: it is a tuple of {len}");
            error::selection_error(output.py(), message)
        })
    }
}

/// Returns the first argument of a layer: its hidden states.
fn first_of<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> Bound<'py, PyAny> {
    let keyword = || kwargs?.values().get_item(0).ok();
    let first = args.get_item(0).ok().or_else(keyword);
    first.unwrap_or_else(|| args.py().None().into_bound(args.py()))
}

/// Returns all in-flight calls, also ones that record nothing: a layer on a worker thread may
/// belong to one.
#[pyfunction]
pub fn calls_in_progress(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    in_progress(py)?.call_method0(intern!(py, "copy"))
}

fn in_progress(py: Python<'_>) -> PyResult<&Bound<'_, PySet>> {
    static ALL: Once<Py<PySet>> = Once::new();
    let all = ALL.get_or_try_init(py, || PySet::empty(py).map(Bound::unbind))?;
    Ok(all.bind(py))
}

/// The in-flight calls of the current context.
///
/// Dynamo guards on attributes that it reads; it traces `ContextVar.get` only since torch 2.14.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct InFlight;

#[pymethods]
impl InFlight {
    /// The innermost call: it records, or keeps others from recording.
    #[getter]
    #[expect(clippy::unused_self, reason = "a getter of an instance")]
    fn innermost<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, RecordedCall>>> {
        innermost(py)
    }
}

/// Returns the innermost call of this context: the one that records, or that keeps the others from
/// recording.
pub fn innermost(py: Python<'_>) -> PyResult<Option<Bound<'_, RecordedCall>>> {
    let frames = Frames::default();
    let Some(frames) = frames.entered(py)? else {
        return Ok(None);
    };
    let mut tags = frame::each(frames)
        .rev()
        .filter_map(|it| Some(it.get().tag(py)?.clone()));
    Ok(tags.find_map(|tag| tag.cast_into().ok()))
}
