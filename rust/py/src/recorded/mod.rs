//! Recording: what it puts into a model, and what stays with each layer.

mod call;
pub mod tree;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ferrohook_core::{Registry, Watch};
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::capture::recorder::Collector;
use crate::contexts::scope::Scopes;
use crate::hooks::hook::Hook;
use crate::recorded::tree::ModuleTree;

pub use call::{Call, calls_in_progress};

/// What recording put into one model, as far as its layers have to know it.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct InstallationBase {
    /// For each key an empty collector of that name, which keeps tensors as the recorders say.
    keys: Vec<Py<Collector>>,
    /// The model's modules as they were.
    tree: Py<ModuleTree>,
    /// Whether each key's recorders match a module.
    complete: bool,
    /// The copies from GPUs that there may be.
    copies: Option<Py<PyAny>>,
    /// How many want the layers watched: where nobody does, they cost nothing.
    watching: AtomicUsize,
    retired: AtomicBool,
}

#[pymethods]
impl InstallationBase {
    #[new]
    #[pyo3(signature = (keys, tree, complete, copies, *_others))]
    fn new(
        keys: Vec<Py<Collector>>,
        tree: Py<ModuleTree>,
        complete: bool,
        copies: Option<Py<PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> Self {
        Self {
            keys,
            tree,
            complete,
            copies,
            watching: AtomicUsize::new(0),
            retired: AtomicBool::new(false),
        }
    }

    /// Whether the model still is as it was.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        self.tree.get().holds(py)
    }

    /// Whether it is to be taken out of the model when the calls in progress have ended.
    #[getter(retired)]
    fn py_retired(&self) -> bool {
        self.retired()
    }

    #[setter(retired)]
    fn set_retired(&self, retired: bool) {
        self.retired.store(retired, Ordering::Release);
    }

    /// Has the layers watched for good: a graph has their hooks in it.
    fn watch(&self) {
        // Relaxed, as below: the layers of a call run in its own thread, or in those that this one
        // told of it.
        self.watching.fetch_add(1, Ordering::Relaxed);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.copies)?;
        self.keys.iter().try_for_each(|key| visit.call(key))
    }
}

impl InstallationBase {
    /// What recording put into a model, if it did.
    fn of<'py>(model: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, Self>>> {
        let found = installations(model.py()).get_item(model.as_ptr().addr())?;
        Ok(found.map(Bound::cast_into).transpose()?)
    }

    /// Whether the model still is as it was, and all that it declares is recorded.
    fn settled(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.complete && self.holds(py)?)
    }

    fn retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    fn unwatch(&self) {
        self.watching.fetch_sub(1, Ordering::Relaxed);
    }

    fn finish_copies(&self, py: Python<'_>) -> PyResult<()> {
        let copies = self.copies.as_ref();
        copies.map_or(Ok(()), |copies| {
            copies.call_method0(py, intern!(py, "finish")).map(drop)
        })
    }
}

/// What recording put into each model, by the models' ids.
pub fn installations(py: Python<'_>) -> &Bound<'_, PyDict> {
    static ALL: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    ALL.get_or_init(py, || PyDict::new(py).unbind()).bind(py)
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
    Call(Bound<'py, Call>),
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
        let Some(call) = call::innermost(py, scopes)? else {
            return Ok(Reason::Unknown);
        };
        Ok(match call.get().installation(py) {
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
