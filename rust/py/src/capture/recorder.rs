//! Capturing: the native hook that keeps what passes a module, and where it keeps it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::exceptions::{PyBaseException, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyDict, PyList, PyString, PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference,
};
use rustc_hash::FxHashSet;

use crate::error;
use crate::torch;

/// Deeper structures than this are kept as they are.
const DEEPEST: usize = 64;

pyo3::create_exception!(
    ferrohook._core,
    Stop,
    PyBaseException,
    "Ends a forward after the last module wanted; the call of the captured model catches it."
);

/// How long a captured tensor stays what it was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyMode {
    /// A reference and its version.
    Checked,
    Clone,
    Ref,
}

/// A tensor that was kept, and its version where reading checks that.
struct KeptTensor {
    value: Py<PyAny>,
    version: Option<i64>,
    gradient: Option<Gradient>,
}

struct Gradient {
    value: Py<PyAny>,
    bytes: usize,
}

/// What one module's one call left.
struct Kept {
    serial: u64,
    value: Py<PyAny>,
    tensors: Vec<KeptTensor>,
    bytes: usize,
}

#[derive(Default)]
struct Store {
    /// For each name what its last calls left, the oldest first.
    kept: Vec<VecDeque<Kept>>,
    /// The names in the order in which they first ran.
    ran: Vec<usize>,
    serial: u64,
    bytes: usize,
    /// Of the module whose calls are to be ended.
    calls: Vec<RootCall>,
}

/// A call that ends when all names have run in it.
struct RootCall {
    thread: ThreadId,
    ran: FxHashSet<usize>,
}

impl Store {
    fn of(names: usize) -> Self {
        let mut store = Self::default();
        store.kept.resize_with(names, VecDeque::new);
        store
    }

    /// Notes that a name ran; whether that ends a call which is under way on this thread.
    fn ends_call(&mut self, index: usize, names: usize) -> bool {
        let thread = thread::current().id();
        let own = self.calls.iter().rposition(|call| call.thread == thread);
        // On another thread: what that was started for by the forward counts, and ends nothing.
        let latest = self.calls.len().checked_sub(1);
        let Some(call) = own.or(latest).map(|at| &mut self.calls[at]) else {
            return false;
        };
        call.ran.insert(index);
        own.is_some() && call.ran.len() == names
    }

    /// Whether `more` bytes in place of `freed` ones stay within the budget, which they then count
    /// for.
    fn afford(&mut self, more: usize, freed: usize, budget: Option<usize>) -> bool {
        let held = self.bytes - freed + more;
        let affordable = budget.is_none_or(|most| held <= most);
        if affordable {
            self.bytes = held;
        }
        affordable
    }
}

/// What one `capture` keeps, and how.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Collector {
    names: Vec<String>,
    detach: bool,
    copy: CopyMode,
    /// How many calls of a module are kept.
    keep: usize,
    /// Applied to each tensor, and to each gradient.
    convert: Option<Py<PyAny>>,
    gradients: bool,
    max_bytes: Option<usize>,
    /// The number of the module whose call ends when all names have run.
    stop: Option<u64>,
    inference: AtomicBool,
    store: Mutex<Store>,
}

#[pymethods]
impl Collector {
    #[new]
    #[pyo3(signature = (names, *, detach, copy, keep, convert, grads, max_bytes, stop))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the options of capture, by keyword"
    )]
    fn new(
        names: Vec<String>,
        detach: bool,
        copy: &str,
        keep: Option<usize>,
        convert: Option<Py<PyAny>>,
        grads: bool,
        max_bytes: Option<usize>,
        stop: Option<u64>,
    ) -> PyResult<Self> {
        let copy = match copy {
            "checked" => CopyMode::Checked,
            "clone" => CopyMode::Clone,
            "ref" => CopyMode::Ref,
            other => {
                return Err(PyValueError::new_err(format!(
                    "unknown copy {other:?}: expected one of checked, clone, ref"
                )));
            }
        };
        let store = Mutex::new(Store::of(names.len()));
        Ok(Self {
            names,
            detach,
            copy,
            keep: keep.unwrap_or(usize::MAX),
            convert,
            gradients: grads,
            max_bytes,
            stop,
            inference: AtomicBool::new(false),
            store,
        })
    }

    /// The indices of the names that ran, in the order of their first calls.
    fn ran(&self) -> Vec<usize> {
        self.store.lock().ran.clone()
    }

    /// What the calls of a name left, the oldest first.
    ///
    /// Raises:
    ///     StaleActivationError: a tensor was changed in place since, unless `stale` allows it.
    #[pyo3(signature = (index, *, stale = false))]
    fn values<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        stale: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut versions = Vec::new();
        let values = {
            let store = self.store.lock();
            let kept = &store.kept[index];
            for each in kept.iter().flat_map(|kept| &kept.tensors) {
                if !stale && let Some(version) = each.version {
                    versions.push((each.value.bind(py).clone(), version));
                }
            }
            kept.iter()
                .map(|kept| kept.value.bind(py).clone())
                .collect()
        };
        for (tensor, version) in versions {
            if self::version(&tensor)? != version {
                return Err(error::stale_activation(
                    py,
                    format!(
                        "{:?} was changed in place after it was captured: capture with \
                         copy=\"clone\" to keep what it was",
                        self.names[index]
                    ),
                ));
            }
        }
        Ok(values)
    }

    /// The gradients of what `values` gives: a list for each call, with an entry for each of its
    /// tensors, None where no gradient came.
    fn gradients<'py>(&self, py: Python<'py>, index: usize) -> Vec<Vec<Option<Bound<'py, PyAny>>>> {
        let store = self.store.lock();
        let gradient = |tensor: &KeptTensor| Some(tensor.gradient.as_ref()?.value.bind(py).clone());
        store.kept[index]
            .iter()
            .map(|kept| kept.tensors.iter().map(gradient).collect())
            .collect()
    }

    /// A forward pre-hook: a call begins of the module whose calls end when all names have run.
    fn begin(&self, _module: &Bound<'_, PyAny>, _args: &Bound<'_, PyAny>) {
        self.store.lock().calls.push(RootCall {
            thread: thread::current().id(),
            ran: FxHashSet::default(),
        });
    }

    /// A forward hook, always called: it is over.
    fn end(
        &self,
        _module: &Bound<'_, PyAny>,
        _args: &Bound<'_, PyAny>,
        _output: &Bound<'_, PyAny>,
    ) {
        let thread = thread::current().id();
        let mut store = self.store.lock();
        if let Some(at) = store.calls.iter().rposition(|call| call.thread == thread) {
            store.calls.remove(at);
        }
    }

    /// Lets all go that was kept.
    fn clear(&self) {
        let fresh = Store::of(self.names.len());
        // Dropped after the lock was released: tensors run code when they go.
        let _old = std::mem::replace(&mut *self.store.lock(), fresh);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.convert)?;
        for kept in self.store.lock().kept.iter().flatten() {
            visit.call(&kept.value)?;
            for each in &kept.tensors {
                visit.call(&each.value)?;
                visit.call(each.gradient.as_ref().map(|gradient| &gradient.value))?;
            }
        }
        Ok(())
    }

    fn __clear__(&self) {
        self.clear();
    }
}

impl Collector {
    /// What its only name is called.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// `value` as it is kept under its only name.
    pub fn kept<'py>(
        slf: &Bound<'py, Self>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Keeping::of(slf, 0).keep(value, 0)
    }

    fn next_serial(&self) -> u64 {
        let mut store = self.store.lock();
        store.serial += 1;
        store.serial
    }

    /// Keeps `value` under a name.
    fn record<'py>(
        slf: &Bound<'py, Self>,
        index: usize,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = value.py();
        let this = slf.get();
        let mut keeping = Keeping::of(slf, index);
        let value = keeping.keep(value, 0)?.unbind();
        let kept = Kept {
            serial: keeping.serial,
            value,
            tensors: keeping.tensors,
            bytes: keeping.bytes,
        };
        let bytes = kept.bytes;
        match this.put(index, kept) {
            Put::OverBudget(_refused) => Err(this.over_budget(py, index, bytes)),
            Put::Kept {
                ends_call: true, ..
            } => Err(Stop::new_err((slf.clone().unbind(),))),
            Put::Kept { .. } => Ok(()),
        }
    }

    fn over_budget(&self, py: Python<'_>, index: usize, bytes: usize) -> PyErr {
        error::capture_budget(
            py,
            format!(
                "keeping {bytes} more bytes of {:?} would exceed max_bytes={}: what was captured \
                 before stays readable",
                self.names[index],
                self.max_bytes.unwrap_or_default()
            ),
        )
    }

    /// The bytes of a tensor, where they are counted.
    fn bytes(&self, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
        if self.max_bytes.is_none() {
            return Ok(0);
        }
        tensor.getattr(intern!(tensor.py(), "nbytes"))?.extract()
    }

    fn put(&self, index: usize, kept: Kept) -> Put {
        let mut store = self.store.lock();
        let slot = &mut store.kept[index];
        let first = slot.is_empty();
        let replaced = if slot.len() >= self.keep {
            slot.pop_front()
        } else {
            None
        };
        let freed = replaced.as_ref().map_or(0, |oldest| oldest.bytes);
        if !store.afford(kept.bytes, freed, self.max_bytes) {
            if let Some(oldest) = replaced {
                store.kept[index].push_front(oldest);
            }
            return Put::OverBudget(kept);
        }
        store.kept[index].push_back(kept);
        if first {
            store.ran.push(index);
        }
        Put::Kept {
            ends_call: self.stop.is_some() && store.ends_call(index, self.names.len()),
            _replaced: replaced,
        }
    }

    /// Keeps a gradient where its tensor is kept; what it replaces.
    fn put_gradient(
        &self,
        slot: &GradientSlot,
        gradient: Gradient,
    ) -> Result<Option<Gradient>, OverBudget> {
        let mut store = self.store.lock();
        let calls = &store.kept[slot.index];
        let Some(at) = calls.iter().position(|kept| kept.serial == slot.serial) else {
            return Ok(None);
        };
        // A second backward leaves another.
        let earlier = &calls[at].tensors[slot.position].gradient;
        let freed = earlier.as_ref().map_or(0, |gradient| gradient.bytes);
        if !store.afford(gradient.bytes, freed, self.max_bytes) {
            return Err(OverBudget);
        }
        let kept = &mut store.kept[slot.index][at];
        kept.bytes = kept.bytes - freed + gradient.bytes;
        Ok(kept.tensors[slot.position].gradient.replace(gradient))
    }

    /// A tensor as it is to be kept.
    fn keep_tensor<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let mut kept = tensor.clone();
        // What needs no gradient is detached already.
        if self.detach && requires_grad(tensor)? {
            kept = kept.call_method0(intern!(py, "detach"))?;
        }
        if let Some(convert) = &self.convert {
            kept = convert.bind(py).call1((kept,))?;
        } else if self.copy == CopyMode::Clone {
            kept = kept.call_method0(intern!(py, "clone"))?;
        }
        Ok(kept)
    }

    /// The tensor with its version, or a copy where none is counted.
    fn checked<'py>(
        &self,
        tensor: Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<i64>)> {
        if self.copy != CopyMode::Checked {
            return Ok((tensor, None));
        }
        let py = tensor.py();
        // Inference tensors count no versions. Raising and catching takes longer than asking.
        if self.inference.load(Ordering::Relaxed)
            && tensor
                .call_method0(intern!(py, "is_inference"))?
                .is_truthy()?
        {
            return Ok((tensor.call_method0(intern!(py, "clone"))?, None));
        }
        if let Ok(version) = version(&tensor) {
            return Ok((tensor, Some(version)));
        }
        self.inference.store(true, Ordering::Relaxed);
        Ok((tensor.call_method0(intern!(py, "clone"))?, None))
    }
}

/// It would exceed `max_bytes`.
struct OverBudget;

/// What became of what was to be kept. What it holds is dropped after the lock was released:
/// tensors run code when they go.
enum Put {
    Kept {
        ends_call: bool,
        _replaced: Option<Kept>,
    },
    OverBudget(Kept),
}

/// The keeping of one value, tensor by tensor.
struct Keeping<'a, 'py> {
    collector: &'a Bound<'py, Collector>,
    index: usize,
    serial: u64,
    tensors: Vec<KeptTensor>,
    bytes: usize,
}

impl<'a, 'py> Keeping<'a, 'py> {
    fn of(collector: &'a Bound<'py, Collector>, index: usize) -> Self {
        Self {
            collector,
            index,
            serial: collector.get().next_serial(),
            tensors: Vec::new(),
            bytes: 0,
        }
    }

    /// The same structure around tensors as they are to be kept.
    fn keep(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        if torch::is_tensor(value)? {
            return self.keep_tensor(value);
        }
        if depth > DEEPEST {
            return Ok(value.clone());
        }
        if let Ok(tuple) = value.cast::<PyTuple>() {
            let items = tuple
                .iter()
                .map(|item| self.keep(&item, depth + 1))
                .collect::<PyResult<Vec<_>>>()?;
            let items = PyTuple::new(py, items)?;
            return if tuple.is_exact_instance_of::<PyTuple>() {
                Ok(items.into_any())
            } else if let Some(make) = value.getattr_opt(intern!(py, "_make"))? {
                make.call1((items,)) // a named tuple
            } else if value.hasattr(intern!(py, "n_sequence_fields"))? {
                value.get_type().call1((items,)) // one of torch.return_types
            } else {
                Ok(items.into_any()) // how others are made, they alone know
            };
        }
        if let Ok(list) = value.cast::<PyList>() {
            let items = list
                .iter()
                .map(|item| self.keep(&item, depth + 1))
                .collect::<PyResult<Vec<_>>>()?;
            return Ok(PyList::new(py, items)?.into_any());
        }
        // A copy keeps the class (a transformers ModelOutput is a dict) and spares the model's own.
        let copy = || py.import("copy")?.call_method1("copy", (value,));
        if let Ok(dict) = value.cast::<PyDict>() {
            let kept = copy()?;
            for (key, item) in dict.iter() {
                kept.set_item(&key, self.keep(&item, depth + 1)?)?;
            }
            return Ok(kept);
        }
        if let Some(fields) = value.getattr_opt(intern!(py, "__dataclass_fields__"))?
            && !value.is_instance_of::<PyType>()
        {
            let kept = copy()?;
            let set = py.get_type::<PyAny>().getattr("__setattr__")?;
            for name in fields.try_iter()? {
                let name = name?;
                if let Some(item) = value.getattr_opt(name.cast::<PyString>()?)? {
                    set.call1((&kept, &name, self.keep(&item, depth + 1)?))?;
                }
            }
            return Ok(kept);
        }
        Ok(value.clone())
    }

    fn keep_tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let this = self.collector.get();
        let (kept, version) = this.checked(this.keep_tensor(tensor)?)?;
        if this.gradients && requires_grad(tensor)? {
            let slot = GradientSlot {
                collector: PyWeakrefReference::new(self.collector)?.unbind(),
                index: self.index,
                serial: self.serial,
                position: self.tensors.len(),
            };
            tensor.call_method1(intern!(py, "register_hook"), (Bound::new(py, slot)?,))?;
        }
        self.bytes += this.bytes(&kept)?;
        self.tensors.push(KeptTensor {
            value: kept.clone().unbind(),
            version,
            gradient: None,
        });
        Ok(kept)
    }
}

/// Takes the gradient of a tensor that was kept.
#[pyclass(frozen)]
struct GradientSlot {
    /// Weak: autograd's graph, which holds this, may outlive what was captured, or be part of it.
    collector: Py<PyWeakrefReference>,
    index: usize,
    serial: u64,
    position: usize,
}

#[pymethods]
impl GradientSlot {
    fn __call__(&self, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = gradient.py();
        let Some(collector) = self.collector.bind(py).upgrade_as::<Collector>()? else {
            return Ok(());
        };
        let collector = collector.get();
        let mut gradient = gradient.clone();
        if let Some(convert) = &collector.convert {
            gradient = convert.bind(py).call1((gradient,))?;
        }
        // The tensor itself where that is possible: autograd adds in place to what nobody else has.
        if requires_grad(&gradient)? {
            gradient = gradient.call_method0(intern!(py, "detach"))?;
        }
        let bytes = collector.bytes(&gradient)?;
        let gradient = Gradient {
            value: gradient.unbind(),
            bytes,
        };
        match collector.put_gradient(self, gradient) {
            Ok(_replaced) => Ok(()),
            Err(OverBudget) => Err(collector.over_budget(py, self.index, bytes)),
        }
    }
}

/// The native hook: records what a module takes or returns.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct Recorder {
    collector: Py<Collector>,
    index: usize,
    inputs: bool,
    /// Records `value[part]` of what passes, or the attribute of that name; None: all of it.
    part: Option<Py<PyAny>>,
}

#[pymethods]
impl Recorder {
    #[new]
    pub fn new(
        collector: Py<Collector>,
        index: usize,
        inputs: bool,
        part: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        if index >= collector.get().names.len() {
            return Err(PyValueError::new_err("the collector has no such name"));
        }
        Ok(Self {
            collector,
            index,
            inputs,
            part,
        })
    }

    /// The phase that it is registered for.
    #[getter(phase)]
    fn phase_name(&self) -> &'static str {
        self.phase().name()
    }

    fn __repr__(&self) -> String {
        format!("capture of {:?}", self.collector.get().names[self.index])
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.collector)?;
        visit.call(&self.part)
    }
}

impl Recorder {
    /// What a trace knows of it, which does not differ from one capture to the next: the part that
    /// is recorded, and whether a graph can have it recorded.
    pub fn traced<'py>(&self, py: Python<'py>) -> (Bound<'py, PyAny>, bool) {
        let collector = self.collector.get();
        let part = self
            .part
            .as_ref()
            .map_or_else(|| py.None(), |part| part.clone_ref(py));
        (
            part.into_bound(py),
            collector.detach && !collector.gradients,
        )
    }

    /// Records a value that was picked from what passes.
    pub fn record_picked(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        Collector::record(self.collector.bind(value.py()), self.index, value)
    }

    pub fn phase(&self) -> Phase {
        if self.inputs {
            Phase::ForwardPre
        } else {
            Phase::Forward
        }
    }

    pub fn record(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match &self.part {
            None => self.record_picked(value),
            Some(part) => self.record_picked(&self.part(value, part.bind(value.py()))?),
        }
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
                    self.collector.get().names[self.index],
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

/// Whether the exception ends the calls of the module with this number, and no error.
#[cold]
pub fn stops(py: Python<'_>, error: &PyErr, module: u64) -> bool {
    let collector = || -> PyResult<Option<u64>> {
        if !error.is_instance_of::<Stop>(py) {
            return Ok(None);
        }
        let collector = error.value(py).getattr("args")?.get_item(0)?;
        Ok(collector.cast::<Collector>()?.get().stop)
    };
    collector().ok().flatten() == Some(module)
}

fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor
        .getattr(intern!(tensor.py(), "requires_grad"))?
        .is_truthy()
}

fn version(tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}
