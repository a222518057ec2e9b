//! Recording: what stays with each layer that a model records, and what one call has of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ferrohook_core::{Registry, Watch};
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySet, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::hook::Hook;
use crate::recorder::Collector;
use crate::scope::{self, ScopeBase, Scopes};
use crate::{error, torch};

/// What recording put into one model, as far as its layers have to know it.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct InstallationBase {
    /// For each key an empty collector of that name, which keeps tensors as the recorders say.
    keys: Vec<Py<Collector>>,
    /// How many want the layers watched: where nobody does, they cost nothing.
    watching: AtomicUsize,
}

#[pymethods]
impl InstallationBase {
    #[new]
    #[pyo3(signature = (keys, *_others))]
    fn new(keys: Vec<Py<Collector>>, _others: &Bound<'_, PyTuple>) -> Self {
        Self {
            keys,
            watching: AtomicUsize::new(0),
        }
    }

    /// Has the layers watched for good: a graph has their hooks in it.
    fn watch(&self) {
        // Relaxed, as below: the layers of a call run in its own thread, or in those that this one
        // told of it.
        self.watching.fetch_add(1, Ordering::Relaxed);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.keys.iter().try_for_each(|key| visit.call(key))
    }
}

/// What is recorded of a layer: under which key, by its place; which item of a tuple; and, of
/// hidden states, whether they begin with what the first layer takes.
type Task = (usize, isize, Option<bool>);

/// What stays with a recorded layer. A callable like a forward hook, for what no context tells the
/// call of.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct RecordedLayerBase {
    installation: Py<InstallationBase>,
    tasks: Vec<Task>,
    /// Whether other recorded layers are inside.
    around: bool,
}

/// What a layer runs for.
pub enum Reason<'py> {
    Call(Bound<'py, CallBase>),
    /// A call of another model, or one that nobody asks about.
    Other,
    /// The context does not tell.
    Unknown,
}

#[pymethods]
impl RecordedLayerBase {
    #[new]
    #[pyo3(signature = (installation, tasks, around, *_others))]
    fn new(
        installation: Py<InstallationBase>,
        tasks: Vec<Task>,
        around: bool,
        _others: &Bound<'_, PyTuple>,
    ) -> Self {
        Self {
            installation,
            tasks,
            around,
        }
    }

    /// What it is part of.
    #[getter]
    fn installation<'py>(&self, py: Python<'py>) -> &Bound<'py, InstallationBase> {
        self.installation.bind(py)
    }

    // No `__clear__`: it never changes, so a cycle through it has another edge to cut.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.installation)
    }
}

impl RecordedLayerBase {
    /// What the layer runs for.
    pub fn reason<'py>(&self, py: Python<'py>, scopes: &Scopes<'py>) -> PyResult<Reason<'py>> {
        if self.installation.get().watching.load(Ordering::Relaxed) == 0 {
            return Ok(Reason::Other);
        }
        let Some(call) = innermost(py, scopes)? else {
            return Ok(Reason::Unknown);
        };
        Ok(match &call.get().installation {
            Some(installation) if installation.is(&self.installation) => Reason::Call(call),
            _ => Reason::Other,
        })
    }

    /// Tells Python that the layer begins, where others are inside and no context tells the call.
    pub fn begin<'py>(
        slf: &Bound<'py, Self>,
        scopes: &Scopes<'py>,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        let this = slf.get();
        if this.around && matches!(this.reason(slf.py(), scopes)?, Reason::Unknown) {
            let kwargs = given(slf.py(), kwargs);
            slf.call_method1(intern!(slf.py(), "begin"), (module, args, kwargs))?;
        }
        Ok(())
    }

    /// Records what the layer returned, or has Python do it where no context tells the call.
    pub fn end<'py>(
        slf: &Bound<'py, Self>,
        scopes: &Scopes<'py>,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        match slf.get().reason(slf.py(), scopes)? {
            Reason::Call(call) => call.get().record(slf, args, kwargs, output),
            Reason::Unknown => {
                let end = intern!(slf.py(), "end");
                let kwargs = given(slf.py(), kwargs);
                slf.call_method1(end, (module, args, kwargs, output))
                    .map(drop)
            }
            Reason::Other => Ok(()),
        }
    }
}

/// The keyword arguments as Python takes them.
fn given<'py>(py: Python<'py>, kwargs: Option<&Bound<'py, PyDict>>) -> Bound<'py, PyDict> {
    kwargs.map_or_else(|| PyDict::new(py), Bound::clone)
}

/// The recordings that a module is a layer of: for most there are none.
#[derive(Default)]
pub struct Recordings {
    any: AtomicBool,
    layers: Mutex<Layers>,
}

#[derive(Default)]
struct Layers {
    all: Arc<[Py<RecordedLayerBase>]>,
    /// Where there are any.
    _watch: Option<Watch<Hook>>,
}

impl Recordings {
    /// Those that there are now.
    #[inline]
    pub fn now(&self) -> Option<Arc<[Py<RecordedLayerBase>]>> {
        // Acquire pairs with the release of whoever changes them.
        let any = self.any.load(Ordering::Acquire);
        any.then(|| Arc::clone(&self.layers.lock().all))
    }

    /// For the module with these hooks.
    pub fn add(&self, layer: &Bound<'_, RecordedLayerBase>, hooks: &Registry<Hook>) {
        let add = |layers: &mut Vec<_>| layers.push(layer.clone().unbind());
        self.change(add, hooks, layer.py());
    }

    /// Takes out what is part of an installation.
    pub fn remove(&self, installation: &Bound<'_, InstallationBase>, hooks: &Registry<Hook>) {
        let others = |layer: &Py<RecordedLayerBase>| !layer.get().installation.is(installation);
        self.change(|layers| layers.retain(others), hooks, installation.py());
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Vec<Py<RecordedLayerBase>>),
        hooks: &Registry<Hook>,
        py: Python<'_>,
    ) {
        let _former; // dropped after the lock was released
        let mut layers = self.layers.lock();
        let mut changed = layers.all.iter().map(|layer| layer.clone_ref(py)).collect();
        change(&mut changed);
        self.any.store(!changed.is_empty(), Ordering::Release);
        let now = Layers {
            _watch: (!changed.is_empty()).then(|| hooks.watch()),
            all: changed.into(),
        };
        _former = std::mem::replace(&mut *layers, now);
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let layers = self.layers.lock();
        layers.all.iter().try_for_each(|layer| visit.call(layer))
    }
}

/// One call of a model in progress, and what it records, if anything.
///
/// The innermost one of a context is the one that records there.
#[pyclass(frozen, subclass, extends = ScopeBase, module = "ferrohook._core")]
pub struct CallBase {
    /// Of whose layers; None where the model never recorded.
    installation: Option<Py<InstallationBase>>,
    /// Of each key, whether it is asked for. Empty where none is.
    asked: Vec<bool>,
    /// Which of the hidden states are kept, where not all are.
    selected: Option<Vec<usize>>,
    /// The call that does not record while this one is in progress.
    around: Option<Py<Self>>,
    /// By this the context's scopes become again what they were.
    token: Mutex<Option<Py<PyAny>>>,
    /// What the model was called with, until the call ends.
    given: Mutex<Option<Py<PyTuple>>>,
    recorded: Mutex<Recorded>,
    ended: AtomicBool,
}

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
impl CallBase {
    #[new]
    #[pyo3(signature = (installation, flags, selected, around, given, *_others))]
    fn new(
        installation: Option<Bound<'_, InstallationBase>>,
        flags: &Bound<'_, PyDict>,
        selected: Option<Vec<usize>>,
        around: Option<Py<Self>>,
        given: Py<PyTuple>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<(Self, ScopeBase)> {
        let mut asked = Vec::new();
        if let Some(installation) = installation.as_ref().filter(|_| !flags.is_empty()) {
            let keys = installation.get().keys.iter();
            asked = keys
                .map(|key| flags.contains(key.get().name()))
                .collect::<PyResult<_>>()?;
        }
        let call = Self {
            installation: installation.map(Bound::unbind),
            asked,
            selected,
            around,
            token: Mutex::default(),
            given: Mutex::new(Some(given)),
            recorded: Mutex::default(),
            ended: AtomicBool::new(false),
        };
        Ok((call, ScopeBase::new()))
    }

    /// Begins: it stands among the context's scopes, in place of the one around it.
    // Natively, as Ctrl-C lands in Python's functions alone.
    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        let (py, this) = (slf.py(), slf.get());
        in_progress(slf)?.add(slf)?;
        if let Some(installation) = this.installation.as_ref().filter(|_| this.records()) {
            installation.get().watch();
        }
        let around = this.around(py).map(Bound::as_any);
        *this.token.lock() = Some(scope::enter(slf.as_any(), around)?.token);
        Ok(slf.clone())
    }

    /// Ends, and records nothing from now on.
    #[pyo3(signature = (*_error))]
    fn __exit__(slf: &Bound<'_, Self>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let variable = scope::variable(py)?;
        let token = this.token.lock().take();
        let reset = token.map(|token| variable.call_method1(intern!(py, "reset"), (token,)));
        this.end();
        in_progress(slf)?.discard(slf)?;
        if let Some(installation) = this.installation(py)
            && installation.getattr(intern!(py, "retired"))?.is_truthy()?
        {
            installation.call_method0(intern!(py, "release_when_idle"))?;
        }
        reset.transpose().map(drop)
    }

    /// The call that does not record while this one is in progress.
    #[getter]
    fn around<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, Self>> {
        Some(self.around.as_ref()?.bind(py))
    }

    /// What the model was called with; None when the call has ended.
    #[getter]
    fn given(&self, py: Python<'_>) -> Option<Py<PyTuple>> {
        Some(self.given.lock().as_ref()?.clone_ref(py))
    }

    /// What the layers are watched by.
    #[getter]
    fn installation<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, InstallationBase>> {
        Some(self.installation.as_ref()?.bind(py))
    }

    /// Whether it records anything.
    #[getter]
    fn records(&self) -> bool {
        !self.asked.is_empty()
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
        for &(key, index, first) in &layer.get().tasks {
            if !self.asked.get(key).is_some_and(|asked| *asked) {
                continue;
            }
            let collector = installation.get().keys[key].bind(py);
            if let Some(first) = first
                && self.begins(first)
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
            let wanted = first.is_none() || self.keeps_next();
            let kept = kept(collector, wanted.then_some(&value))?;
            kept_as_it_is |= kept.is(main_of(output));
            self.recorded.lock().values.push((key, kept));
        }
        if !kept_as_it_is {
            self.note(output)?;
        }
        Ok(())
    }

    /// What was recorded under each key, in the order of the layers' calls; the call has it no more.
    fn recorded<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let recorded = std::mem::take(&mut *self.recorded.lock());
        let found = PyDict::new(py);
        let Some(installation) = &self.installation else {
            return Ok(found);
        };
        for (place, key) in installation.get().keys.iter().enumerate() {
            if self.asked.get(place).is_some_and(|asked| *asked) {
                let all = recorded.taken.iter().chain(&recorded.values);
                let values: Vec<_> = all
                    .filter(|(key, _)| *key == place)
                    .map(|(_, value)| value)
                    .collect();
                found.set_item(key.get().name(), PyTuple::new(py, values)?)?;
            }
        }
        Ok(found)
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
        visit.call(&self.installation)?;
        visit.call(&self.around)?;
        visit.call(&*self.token.lock())?;
        visit.call(&*self.given.lock())?;
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

impl CallBase {
    fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(installation) = self.installation.as_ref().filter(|_| self.records()) {
            installation.get().watching.fetch_sub(1, Ordering::Relaxed);
        }
        self.__clear__();
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
    fn begins(&self, first: bool) -> bool {
        let mut recorded = self.recorded.lock();
        let begins = first && recorded.states.is_none();
        recorded.states.get_or_insert(usize::from(first));
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

/// All calls in progress, as Python knows them.
fn in_progress<'py>(call: &Bound<'py, CallBase>) -> PyResult<Bound<'py, PySet>> {
    let all = call.getattr(intern!(call.py(), "IN_PROGRESS"))?;
    Ok(all.cast_into()?)
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

/// The call that records in this context, or keeps others from it.
fn innermost<'py>(py: Python<'py>, scopes: &Scopes<'py>) -> PyResult<Option<Bound<'py, CallBase>>> {
    let Some(scopes) = scopes.entered(py)? else {
        return Ok(None);
    };
    let call = scopes.iter().find_map(|scope| scope.cast_into().ok());
    Ok(call)
}
