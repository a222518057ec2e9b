//! One call of a model: what its layers are recorded for.

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
use crate::contexts::current::{self, Scopes};
use crate::contexts::frame::Frame;
use crate::cpython::invoke;
use crate::error;
use crate::recorded::installation::InstallationBase;
use crate::recorded::layer::{RecordedLayerBase, Task};
use crate::torch;

/// One call of a model in progress, and what it records, if anything.
///
/// The innermost one of a context is the one that records there.
#[pyclass(frozen, extends = Frame, module = "ferrohook._core")]
pub struct Call {
    model: Py<PyAny>,
    /// Of whose layers; None where the model never recorded.
    installation: Option<Py<InstallationBase>>,
    /// Of each key, whether it is asked for. Empty where none is.
    asked: Vec<bool>,
    /// Which of the hidden states are kept, where not all are.
    selected: Option<Vec<usize>>,
    /// The call that does not record while this one is in progress.
    around: Option<Py<Self>>,
    /// What the model was called with, until the call ends.
    given: Mutex<Option<Given>>,
    /// The identifier of the thread that makes it.
    thread: Py<PyAny>,
    /// The threads that were there before, and have other things to do than help.
    threads: Option<Py<PyAny>>,
    /// The classes of layers that may be this call's, and nothing told.
    unattributed: Mutex<BTreeSet<String>>,
    recorded: Mutex<Recorded>,
    ended: AtomicBool,
}

type Given = (Py<PyTuple>, Py<PyDict>);

#[derive(Default)]
struct Recorded {
    /// In order, with the places of their keys.
    values: Vec<(usize, Py<PyAny>)>,
    /// What the first layer took, likewise.
    taken: Option<(usize, Py<PyAny>)>,
    /// How many hidden states there are so far, from when the first layer has returned.
    states: Option<usize>,
    /// What else the layers returned, weakly: by that a layer is known which another thread runs.
    seen: Vec<Py<PyWeakrefReference>>,
}

#[pymethods]
impl Call {
    /// A call that is to begin.
    #[new]
    fn new<'py>(
        model: Bound<'py, PyAny>,
        installation: Option<Bound<'py, InstallationBase>>,
        flags: &Bound<'py, PyDict>,
        selected: Option<Vec<usize>>,
        around: Option<Bound<'py, Self>>,
        args: Bound<'py, PyTuple>,
        kwargs: Bound<'py, PyDict>,
    ) -> PyResult<(Self, Frame)> {
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
        let call = Self {
            thread: get_ident.call0()?.unbind(),
            model: model.unbind(),
            installation: installation.map(Bound::unbind),
            asked,
            selected,
            around: around.map(Bound::unbind),
            given: Mutex::new(Some((args.unbind(), kwargs.unbind()))),
            threads,
            unattributed: Mutex::default(),
            recorded: Mutex::default(),
            ended: AtomicBool::new(false),
        };
        Ok((call, Frame::new(None)))
    }

    /// Runs the forward: what it returned, and what was recorded under each key, in the order of the
    /// layers' calls. None, and nothing was run, where the installation was retired meanwhile.
    // Natively, as Ctrl-C lands in Python's functions alone.
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

    /// The identifier of the thread that makes it.
    #[getter]
    fn thread<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.thread.bind(py)
    }

    /// The threads that were there before it, where it records.
    #[getter]
    fn threads<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match &self.threads {
            Some(threads) => threads.bind(py).clone(),
            None => PyList::empty(py).into_any(),
        }
    }

    /// The call that does not record while this one is in progress.
    #[getter]
    fn around<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, Self>> {
        Some(self.around.as_ref()?.bind(py))
    }

    /// What the model was called with: args and kwargs; None when the call has ended.
    #[getter]
    fn given(&self, py: Python<'_>) -> Option<Given> {
        let given = self.given.lock();
        let (args, kwargs) = given.as_ref()?;
        Some((args.clone_ref(py), kwargs.clone_ref(py)))
    }

    /// What the layers are watched by.
    #[getter]
    pub fn installation<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, InstallationBase>> {
        Some(self.installation.as_ref()?.bind(py))
    }

    /// Whether it records anything.
    #[getter]
    fn records(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The classes of layers that ran and may be missing.
    #[getter]
    fn unattributed(&self) -> Vec<String> {
        self.unattributed.lock().iter().cloned().collect()
    }

    /// Notes that a layer of that class ran, and nothing told whose it was.
    fn leave_out(&self, class: String) {
        self.unattributed.lock().insert(class);
    }

    /// Records what a layer returned; the layer is one of the call's installation.
    ///
    /// Raises:
    ///     SelectionError: a tuple has no such item.
    pub fn record<'py>(
        &self,
        layer: &Bound<'py, RecordedLayerBase>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = layer.py();
        let Some(installation) = &self.installation else {
            return Ok(());
        };
        if self.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut kept_as_it_is = false;
        for &Task {
            key,
            index,
            initial,
        } in &layer.get().tasks
        {
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
                let kept = kept(collector, taken.as_ref().filter(|_| self.keeps(0)))?;
                self.recorded.lock().taken = Some((key, kept));
            }
            let Some(value) = picked(collector, output, index)? else {
                continue;
            };
            let wanted = initial.is_none() || self.keeps_next();
            let kept = kept(collector, wanted.then_some(&value))?;
            kept_as_it_is |= kept.is(main_of(output));
            self.recorded.lock().values.push((key, kept));
        }
        if !kept_as_it_is {
            self.note(output)?;
        }
        Ok(())
    }

    /// What its layers returned, as far as somebody has it.
    fn seen<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let recorded = self.recorded.lock();
        let kept = recorded
            .values
            .iter()
            .map(|(_, value)| value.bind(py).clone());
        let others = recorded
            .seen
            .iter()
            .filter_map(|each| each.bind(py).upgrade());
        kept.chain(others).collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.model)?;
        visit.call(&self.installation)?;
        visit.call(&self.around)?;
        visit.call(&self.threads)?;
        if let Some((args, kwargs)) = &*self.given.lock() {
            visit.call(args)?;
            visit.call(kwargs)?;
        }
        let recorded = self.recorded.lock();
        let mut values = recorded.taken.iter().chain(&recorded.values);
        values.try_for_each(|(_, value)| visit.call(value))
    }

    fn __clear__(&self) {
        // Dropped after the locks were released: tensors run code when they go.
        let _given = self.given.lock().take();
        let _recorded = std::mem::take(&mut *self.recorded.lock());
    }
}

/// What a forward returned, and what was recorded.
type Ran<'py> = (Bound<'py, PyAny>, Bound<'py, PyDict>);

impl Call {
    fn run_inside<'py>(&self, forward: &Bound<'py, PyAny>) -> PyResult<Option<Ran<'py>>> {
        let py = forward.py();
        let installation = self.installation(py).map(Bound::get);
        if installation.is_some_and(InstallationBase::retired) {
            return Ok(None);
        }
        let given = self.given(py);
        let (args, kwargs) = given.ok_or_else(|| PyRuntimeError::new_err("a call runs once"))?;
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

    /// Puts what was recorded under each key; the call has it no more.
    fn collect(&self, installation: &InstallationBase, into: &Bound<'_, PyDict>) -> PyResult<()> {
        let recorded = std::mem::take(&mut *self.recorded.lock());
        for (place, key) in installation.keys.iter().enumerate() {
            if self.asked[place] {
                let all = recorded.taken.iter().chain(&recorded.values);
                let values: Vec<_> = all
                    .filter(|(key, _)| *key == place)
                    .map(|(_, value)| value)
                    .collect();
                into.set_item(key.get().name(), PyTuple::new(into.py(), values)?)?;
            }
        }
        Ok(())
    }

    /// Notes what a layer returned.
    fn note(&self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let main = main_of(output);
        if torch::is_tensor(&main)? {
            let reference = PyWeakrefReference::new(&main)?.unbind();
            self.recorded.lock().seen.push(reference);
        }
        Ok(())
    }

    /// Whether what the layer takes is the first hidden state.
    fn begins(&self, initial: bool) -> bool {
        let mut recorded = self.recorded.lock();
        let begins = initial && recorded.states.is_none();
        recorded.states.get_or_insert(usize::from(initial));
        begins
    }

    /// Whether the next hidden state is kept.
    fn keeps_next(&self) -> bool {
        let mut recorded = self.recorded.lock();
        let place = recorded.states.get_or_insert_default();
        *place += 1;
        self.keeps(*place - 1)
    }

    fn keeps(&self, place: usize) -> bool {
        let selected = self.selected.as_ref();
        selected.is_none_or(|selected| selected.contains(&place))
    }
}

/// A call that has begun; it ends whatever becomes of the forward.
struct InProgress<'a, 'py> {
    call: &'a Bound<'py, Call>,
    /// Makes the context's scopes again what they were.
    token: Option<Py<PyAny>>,
    ended: bool,
}

impl<'a, 'py> InProgress<'a, 'py> {
    /// The call stands among the context's scopes from now on, in place of the one around it.
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
        let around = this.around(py).map(Bound::as_any);
        progress.token = Some(current::enter(call.as_any(), around)?.token);
        Ok(progress)
    }

    fn end(mut self) -> PyResult<()> {
        self.end_once()
    }

    /// It records nothing from now on.
    fn end_once(&mut self) -> PyResult<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let (py, this) = (self.call.py(), self.call.get());
        let variable = current::variable(py)?;
        let token = self.token.take();
        let reset = token.map(|token| variable.call_method1(intern!(py, "reset"), (token,)));
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

/// All calls in progress: those that record nothing too, as a layer on a helper thread is one of
/// theirs.
#[pyfunction]
pub fn calls_in_progress(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    in_progress(py)?.call_method0(intern!(py, "copy"))
}

fn in_progress(py: Python<'_>) -> PyResult<&Bound<'_, PySet>> {
    static ALL: PyOnceLock<Py<PySet>> = PyOnceLock::new();
    let all = ALL.get_or_try_init(py, || PySet::empty(py).map(Bound::unbind))?;
    Ok(all.bind(py))
}

/// The call that records in this context, or keeps others from it.
pub fn innermost<'py>(py: Python<'py>, scopes: &Scopes<'py>) -> PyResult<Option<Bound<'py, Call>>> {
    let Some(scopes) = scopes.entered(py)? else {
        return Ok(None);
    };
    let call = scopes.iter().find_map(|scope| scope.cast_into().ok());
    Ok(call)
}

/// A value as it is kept; None in place of what is not.
fn kept(collector: &Bound<'_, Collector>, value: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
    match value {
        Some(value) => Collector::kept(collector, value).map(Bound::unbind),
        None => Ok(collector.py().None()),
    }
}

/// What a layer computes: the first item of a tuple.
fn main_of<'py>(output: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
    let first = output.cast::<PyTuple>().ok();
    let first = first.and_then(|tuple| tuple.get_item(0).ok());
    first.unwrap_or_else(|| output.clone())
}

/// What is recorded of a layer's output; nothing of None.
fn picked<'py>(
    collector: &Bound<'py, Collector>,
    output: &Bound<'py, PyAny>,
    index: isize,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let value = match output.cast::<PyTuple>() {
        Err(_) => output.clone(),
        Ok(tuple) => {
            let len = tuple.len();
            let place = index.checked_add_unsigned(if index < 0 { len } else { 0 });
            let place = place.and_then(|place| usize::try_from(place).ok());
            let item = place.and_then(|place| tuple.get_item(place).ok());
            item.ok_or_else(|| {
                error::selection_error(
                    output.py(),
                    format!(
                        "{:?} has no output_index {index}: it is a tuple of {len}",
                        collector.get().name()
                    ),
                )
            })?
        }
    };
    Ok((!value.is_none()).then_some(value))
}
