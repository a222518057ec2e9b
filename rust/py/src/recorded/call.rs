//! `Call`: an in-flight call of a model, and the outputs that it records.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PySet, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::capture::collector::Collector;
use crate::capture::keeping;
use crate::contexts::current::{self, Frames};
use crate::contexts::frame::Frame;
use crate::cpython::invoke;
use crate::error;
use crate::recorded::installation::InstallationBase;
use crate::torch;

/// Key that a layer is recorded under.
#[derive(FromPyObject)]
pub struct LayerKey {
    /// Index of the key in the installation.
    pub key: usize,
    /// Index of the recorded item, for an output that is a tuple.
    pub item: isize,
    /// Only for hidden states: true if they begin with the input of the first layer.
    pub initial: Option<bool>,
}

/// In-flight call of a model, and the outputs that it records, if any.
///
/// While it runs it is the tag of a frame of its context; the innermost call of a context records.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Call {
    model: Py<PyAny>,
    /// None if the model never recorded.
    installation: Option<Py<InstallationBase>>,
    /// For each key of the installation, true if it is recorded. Empty if none is.
    asked: Vec<bool>,
    /// Indices of the hidden states that are stored; None for all.
    selected: Option<Vec<usize>>,
    /// The enclosing call, which does not record while this one is in flight.
    around: Option<Py<Self>>,
    /// None once the call has ended.
    arguments: Mutex<Option<Arguments>>,
    /// Identifier of the calling thread.
    thread: Py<PyAny>,
    /// Threads that existed before the call: none of them runs layers for it.
    threads: Option<Py<PyAny>>,
    /// Classes of layers that ran, were not attributed and may be this call's.
    unattributed: Mutex<BTreeSet<String>>,
    recorded: Mutex<Recorded>,
    ended: AtomicBool,
}

/// Positional and keyword arguments.
type Arguments = (Py<PyTuple>, Py<PyDict>);

/// A recorded value, and the index of its key.
struct Value {
    key: usize,
    value: Py<PyAny>,
}

#[derive(Default)]
struct Recorded {
    /// Values in the order of the layers' calls.
    values: Vec<Value>,
    /// The input of the first layer.
    initial: Option<Value>,
    /// Count of hidden states so far; None until the first layer has returned.
    states: Option<usize>,
    /// Outputs of layers that are not stored, for attributing layers on other threads.
    others: Vec<Py<PyWeakrefReference>>,
}

#[pymethods]
impl Call {
    /// Prepares a call.
    #[new]
    fn new<'py>(
        model: Bound<'py, PyAny>,
        installation: Option<Bound<'py, InstallationBase>>,
        flags: &Bound<'py, PyDict>,
        selected: Option<Vec<usize>>,
        around: Option<Bound<'py, Self>>,
        args: Bound<'py, PyTuple>,
        kwargs: Bound<'py, PyDict>,
    ) -> PyResult<Self> {
        static GET_IDENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        static ENUMERATE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = model.py();
        let get_ident = GET_IDENT.import(py, "threading", "get_ident")?;
        let mut asked = Vec::new();
        let mut threads = None;
        if let Some(installation) = installation.as_ref().filter(|_| !flags.is_empty()) {
            let keys = installation.get().keys.iter();
            asked = keys
                .map(|key| flags.contains(key.get().name()))
                .collect::<PyResult<_>>()?;
            let enumerate = ENUMERATE.import(py, "threading", "enumerate")?;
            threads = Some(enumerate.call0()?.unbind());
        }
        Ok(Self {
            thread: get_ident.call0()?.unbind(),
            model: model.unbind(),
            installation: installation.map(Bound::unbind),
            asked,
            selected,
            around: around.map(Bound::unbind),
            arguments: Mutex::new(Some((args.unbind(), kwargs.unbind()))),
            threads,
            unattributed: Mutex::default(),
            recorded: Mutex::default(),
            ended: AtomicBool::new(false),
        })
    }

    /// Runs the forward. Returns its output, and the recorded values of each key in the order of
    /// the layers' calls; None, without running it, if the installation was retired meanwhile.
    // Native, since Ctrl-C may interrupt only Python functions.
    fn run<'py>(slf: &Bound<'py, Self>, forward: &Bound<'py, PyAny>) -> PyResult<Option<Ran<'py>>> {
        let progress = InProgress::begin(slf)?;
        let ran = slf.get().run_inside(forward);
        let ended = progress.end();
        let ran = ran?;
        ended.map(|()| ran)
    }

    /// The model.
    #[getter]
    fn model<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.model.bind(py)
    }

    /// Identifier of the calling thread.
    #[getter]
    fn thread<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.thread.bind(py)
    }

    /// Threads that existed before the call, if it records.
    #[getter]
    fn threads<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match &self.threads {
            Some(threads) => threads.bind(py).clone(),
            None => PyList::empty(py).into_any(),
        }
    }

    /// The enclosing call, which does not record while this one is in flight.
    #[getter]
    fn around<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, Self>> {
        Some(self.around.as_ref()?.bind(py))
    }

    /// Positional and keyword arguments of the call; None once it has ended.
    #[getter]
    fn arguments(&self, py: Python<'_>) -> Option<Arguments> {
        let arguments = self.arguments.lock();
        let (args, kwargs) = arguments.as_ref()?;
        Some((args.clone_ref(py), kwargs.clone_ref(py)))
    }

    /// The installation of the model.
    #[getter]
    pub fn installation<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, InstallationBase>> {
        Some(self.installation.as_ref()?.bind(py))
    }

    /// True if it records anything.
    #[getter]
    fn records(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Classes of layers that ran and may be missing.
    #[getter]
    fn unattributed(&self) -> Vec<String> {
        self.unattributed.lock().iter().cloned().collect()
    }

    /// Records that a layer of that class ran and was not attributed.
    fn leave_out(&self, class: String) {
        self.unattributed.lock().insert(class);
    }

    /// Lists the layers' outputs that are alive.
    fn outputs<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let recorded = self.recorded.lock();
        let stored = recorded
            .values
            .iter()
            .map(|value| value.value.bind(py).clone());
        let others = recorded
            .others
            .iter()
            .filter_map(|each| each.bind(py).upgrade());
        stored.chain(others).collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.model)?;
        visit.call(&self.installation)?;
        visit.call(&self.around)?;
        visit.call(&self.threads)?;
        if let Some((args, kwargs)) = &*self.arguments.lock() {
            visit.call(args)?;
            visit.call(kwargs)?;
        }
        let recorded = self.recorded.lock();
        let mut values = recorded.initial.iter().chain(&recorded.values);
        values.try_for_each(|value| visit.call(&value.value))
    }

    fn __clear__(&self) {
        // Dropped after the locks are released: destructors of tensors run code.
        let _arguments = self.arguments.lock().take();
        let _recorded = std::mem::take(&mut *self.recorded.lock());
    }
}

/// Output of a forward, and the recorded values.
type Ran<'py> = (Bound<'py, PyAny>, Bound<'py, PyDict>);

impl Call {
    fn run_inside<'py>(&self, forward: &Bound<'py, PyAny>) -> PyResult<Option<Ran<'py>>> {
        let py = forward.py();
        let installation = self.installation(py).map(Bound::get);
        if installation.is_some_and(InstallationBase::retired) {
            return Ok(None);
        }
        let arguments = self.arguments(py);
        let (args, kwargs) =
            arguments.ok_or_else(|| PyRuntimeError::new_err("a call runs once"))?;
        let (args, kwargs) = (args.bind(py), kwargs.bind(py));
        let model = self.model.bind(py);
        let output = invoke::call_with_first(forward, model, args, Some(kwargs))?;
        let recorded = PyDict::new(py);
        if let Some(installation) = installation.filter(|_| self.records()) {
            self.collect(installation, &recorded)?;
            installation.finish_copies(py)?;
        }
        Ok(Some((output, recorded)))
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
        let Some(installation) = &self.installation else {
            return Ok(());
        };
        if self.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut output_is_stored = false;
        for &LayerKey { key, item, initial } in keys {
            if !self.asked.get(key).is_some_and(|asked| *asked) {
                continue;
            }
            let collector = installation.get().keys[key].bind(py);
            if let Some(initial) = initial
                && self.begins(initial)
            {
                let taken = match kwargs {
                    Some(kwargs) if args.is_empty() => kwargs.values().get_item(0).ok(),
                    _ => args.get_item(0).ok(),
                };
                let value = stored(collector, taken.as_ref().filter(|_| self.stores(0)))?;
                self.recorded.lock().initial = Some(Value { key, value });
            }
            let Some(value) = item_of(collector, output, item)? else {
                continue;
            };
            let wanted = initial.is_none() || self.stores_next();
            let value = stored(collector, wanted.then_some(&value))?;
            output_is_stored |= value.is(main_of(output));
            let value = Value { key, value };
            self.recorded.lock().values.push(value);
        }
        if !output_is_stored {
            self.note(output)?;
        }
        Ok(())
    }

    /// Moves the recorded values out of the call.
    fn collect(&self, installation: &InstallationBase, into: &Bound<'_, PyDict>) -> PyResult<()> {
        let recorded = std::mem::take(&mut *self.recorded.lock());
        for (place, key) in installation.keys.iter().enumerate() {
            if self.asked[place] {
                let all = recorded.initial.iter().chain(&recorded.values);
                let values: Vec<_> = all
                    .filter(|value| value.key == place)
                    .map(|value| &value.value)
                    .collect();
                into.set_item(key.get().name(), PyTuple::new(into.py(), values)?)?;
            }
        }
        Ok(())
    }

    /// Stores a weak reference to a layer's output.
    fn note(&self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let main = main_of(output);
        if torch::is_tensor(&main)? {
            let reference = PyWeakrefReference::new(&main)?.unbind();
            self.recorded.lock().others.push(reference);
        }
        Ok(())
    }

    /// True if the layer's input is to be the first hidden state.
    fn begins(&self, initial: bool) -> bool {
        let mut recorded = self.recorded.lock();
        let begins = initial && recorded.states.is_none();
        recorded.states.get_or_insert(usize::from(initial));
        begins
    }

    /// Counts a hidden state; true if it is stored.
    fn stores_next(&self) -> bool {
        let mut recorded = self.recorded.lock();
        let place = recorded.states.get_or_insert_default();
        *place += 1;
        self.stores(*place - 1)
    }

    fn stores(&self, place: usize) -> bool {
        let selected = self.selected.as_ref();
        selected.is_none_or(|selected| selected.contains(&place))
    }
}

/// Guard of a call that has begun: ends it even if the forward raises.
struct InProgress<'a, 'py> {
    call: &'a Bound<'py, Call>,
    /// Restores the context's frames.
    token: Option<Py<PyAny>>,
    ended: bool,
}

impl<'a, 'py> InProgress<'a, 'py> {
    /// Enters a frame for the call, in place of the frame of the enclosing call.
    fn begin(call: &'a Bound<'py, Call>) -> PyResult<Self> {
        let (py, this) = (call.py(), call.get());
        if let Some(installation) = this.installation.as_ref().filter(|_| this.records()) {
            installation.get().watch();
        }
        let mut progress = Self {
            call,
            token: None,
            ended: false,
        };
        in_progress(py)?.add(call)?;
        let frame = Bound::new(py, Frame::new(Some(call.clone().into_any().unbind())))?;
        let around = |frame: &Bound<'_, PyAny>| match (this.around(py), call_of(frame)) {
            (Some(around), Some(call)) => call.is(around),
            _ => false,
        };
        progress.token = Some(current::enter_in_place_of(frame.as_any(), around)?.token);
        Ok(progress)
    }

    fn end(mut self) -> PyResult<()> {
        self.end_once()
    }

    /// Ends the call, once: it records nothing from now on.
    fn end_once(&mut self) -> PyResult<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let (py, this) = (self.call.py(), self.call.get());
        let token = self.token.take();
        let reset = token.map(|token| current::reset(token.bind(py)));
        this.ended.store(true, Ordering::Release);
        if let Some(installation) = this.installation.as_ref().filter(|_| this.records()) {
            installation.get().unwatch();
        }
        this.__clear__();
        in_progress(py)?.discard(self.call)?;
        if let Some(installation) = this.installation(py)
            && installation.get().retired()
        {
            installation.call_method0(intern!(py, "release_when_idle"))?;
        }
        reset.transpose().map(drop)
    }
}

impl Drop for InProgress<'_, '_> {
    fn drop(&mut self) {
        if let Err(error) = self.end_once() {
            error.write_unraisable(self.call.py(), Some(self.call));
        }
    }
}

/// Returns all in-flight calls, also those that record nothing: a layer on a worker thread may
/// belong to one.
#[pyfunction]
pub fn calls_in_progress(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    in_progress(py)?.call_method0(intern!(py, "copy"))
}

fn in_progress(py: Python<'_>) -> PyResult<&Bound<'_, PySet>> {
    static ALL: PyOnceLock<Py<PySet>> = PyOnceLock::new();
    let all = ALL.get_or_try_init(py, || PySet::empty(py).map(Bound::unbind))?;
    Ok(all.bind(py))
}

/// Returns the innermost call of this context: the one that records, or that keeps the others from
/// recording.
pub fn innermost<'py>(py: Python<'py>, frames: &Frames<'py>) -> PyResult<Option<Bound<'py, Call>>> {
    let mut frames = frames.entered(py)?.into_iter().flatten();
    Ok(frames.find_map(|frame| call_of(&frame)))
}

/// Returns the call that is the tag of a frame.
fn call_of<'py>(frame: &Bound<'py, PyAny>) -> Option<Bound<'py, Call>> {
    let tag = frame.cast::<Frame>().ok()?.get().tag(frame.py())?;
    tag.cast::<Call>().ok().cloned()
}

/// Converts a value for storage; None stands for one that is not stored.
fn stored(
    collector: &Bound<'_, Collector>,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    match value {
        Some(value) => keeping::prepare(collector, value).map(Bound::unbind),
        None => Ok(collector.py().None()),
    }
}

/// Returns the main output of a layer: the first item of a tuple.
fn main_of<'py>(output: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
    let first = output.cast::<PyTuple>().ok();
    let first = first.and_then(|tuple| tuple.get_item(0).ok());
    first.unwrap_or_else(|| output.clone())
}

/// Picks the recorded item of a layer's output; None if the item is None.
fn item_of<'py>(
    collector: &Bound<'py, Collector>,
    output: &Bound<'py, PyAny>,
    item: isize,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let value = match output.cast::<PyTuple>() {
        Err(_) => output.clone(),
        Ok(tuple) => {
            let len = tuple.len();
            let place = item.checked_add_unsigned(if item < 0 { len } else { 0 });
            let place = place.and_then(|place| usize::try_from(place).ok());
            let found = place.and_then(|place| tuple.get_item(place).ok());
            found.ok_or_else(|| {
                error::selection_error(
                    output.py(),
                    format!(
                        "{:?} has no output_index {item}: it is a tuple of {len}",
                        collector.get().name()
                    ),
                )
            })?
        }
    };
    Ok((!value.is_none()).then_some(value))
}
