//! `Collector`: stores the values of one capture, by its options.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use rustc_hash::FxHashSet;

use crate::call::stop::Stop;
use crate::capture::joining::Steps;
use crate::capture::store::{Budget, Gradient, Kept, KeptTensor, OverBudget, Store, TensorSlot};
use crate::error;
use crate::rows::places::TokenPositions;
use crate::torch;
use crate::torch::tensors::{requires_grad, version};

/// Protection of a captured tensor against later changes in place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyMode {
    /// Stores a reference and its version.
    Checked,
    Clone,
    Ref,
}

/// Values of one `capture`, and its options.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Collector {
    names: Arc<[String]>,
    detach: bool,
    copy: CopyMode,
    /// Number of calls of a module that are stored.
    keep: usize,
    /// Applied to each tensor, and to each gradient.
    convert: Option<Py<PyAny>>,
    gradients: bool,
    max_bytes: Option<usize>,
    /// Budget that it shares with other collectors of a request.
    shared_budget: Option<Arc<Budget>>,
    /// Id of the registry of the module whose call ends once all names have run.
    stop: Option<u64>,
    inference: AtomicBool,
    /// True once values may be on their way that nobody waits for before they are read.
    awaited: AtomicBool,
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
            names: names.into(),
            detach,
            copy,
            keep: keep.unwrap_or(usize::MAX),
            convert,
            gradients: grads,
            max_bytes,
            shared_budget: None,
            stop,
            inference: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            store,
        })
    }

    /// Indices of the names that ran, in the order of their first calls.
    fn ran(&self) -> Vec<usize> {
        self.store.lock().ran.clone()
    }

    /// Values of the calls of a name, the oldest first. They share no memory with rows of other
    /// requests, but with `stale`, which is for sizes and shapes.
    ///
    /// Raises:
    ///     StaleActivationError: a tensor was changed in place since; `stale` allows that.
    #[pyo3(signature = (index, *, stale = false))]
    fn values<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        stale: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (tensors, values) = {
            let store = self.store.lock();
            let kept = &store.kept[index];
            let tensors = kept.iter().flat_map(|kept| &kept.tensors);
            let tensors: Vec<_> = tensors.map(|each| each.stored(py)).collect();
            let values: Vec<_> = kept.iter().map(|kept| kept.view(py)).collect();
            (tensors, values)
        };
        for tensor in tensors {
            if !stale && !tensor.is_current()? {
                return Err(error::stale_activation(
                    py,
                    format!(
                        "{:?} was changed in place after it was captured: capture with \
                         copy=\"clone\" to keep what it was",
                        self.names[index]
                    ),
                ));
            }
            tensor.begin_read()?;
        }
        let read = values.iter().map(|view| {
            if view.shared && !stale {
                return view.owned(index, &self.store, self.checks());
            }
            view.narrowed()
        });
        read.collect()
    }

    /// Tokens of the stored calls of a name as one tensor, in order of position, which is stored in
    /// place of theirs; None where `values` has to tell.
    fn joined<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.keep != 1 || !self.merges() {
            return Ok(None);
        }
        let steps = Steps::of(py, &self.store.lock().kept[index]);
        let join = |steps: Steps<'py>| steps.join(index, &self.store, self.checks());
        steps.map_or(Ok(None), join)
    }

    /// Positions of the tokens of each of these values, and their dimension, None for a padded row;
    /// None where they are not known.
    fn positions(&self, index: usize) -> Vec<Option<(Vec<i64>, Option<usize>)>> {
        let store = self.store.lock();
        let positions = store.kept[index].iter().map(|kept| &kept.positions);
        let found = |it: &TokenPositions| (it.values.iter().map(|at| at.0).collect(), it.dim);
        positions.map(|it| it.as_ref().map(found)).collect()
    }

    /// Positions of all tokens of these values, in order; None if those of a value are not known.
    fn tokens(&self, index: usize) -> Option<Vec<i64>> {
        let store = self.store.lock();
        let mut found = Vec::new();
        for kept in &store.kept[index] {
            let positions = kept.positions.as_ref()?.values.iter();
            found.extend(positions.map(|at| at.0).filter(|at| *at >= 0));
        }
        drop(store);
        found.sort_unstable();
        found.dedup();
        Some(found)
    }

    /// Gradients of the result of `values`: a list for each call, with an entry for each of its
    /// tensors, None if it got no gradient.
    fn gradients<'py>(&self, py: Python<'py>, index: usize) -> Vec<Vec<Option<Bound<'py, PyAny>>>> {
        let store = self.store.lock();
        let gradient = |tensor: &KeptTensor| Some(tensor.gradient.as_ref()?.value.bind(py).clone());
        store.kept[index]
            .iter()
            .map(|kept| kept.tensors.iter().map(gradient).collect())
            .collect()
    }

    /// Has readers ask Python for values, which may have to wait for a GPU first.
    fn await_values(&self) {
        // Relaxed: readers know of the batch that was left here.
        self.awaited.store(true, Ordering::Relaxed);
    }

    /// Drops all stored values.
    fn clear(&self) {
        let fresh = Store::of(self.names.len());
        // Dropped after the lock is released: destructors of tensors run code.
        let old = std::mem::replace(&mut *self.store.lock(), fresh);
        if let Some(budget) = &self.shared_budget {
            let _less = budget.replace(0, old.bytes);
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.convert)?;
        for kept in self.store.lock().kept.iter().flatten() {
            visit.call(&kept.value)?;
            for each in &kept.tensors {
                visit.call(&each.value)?;
                each.order.traverse(&visit)?;
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
    /// Makes an empty collector with the same options, and a budget that others share.
    pub fn fresh(&self, py: Python<'_>, shared_budget: Option<Arc<Budget>>) -> PyResult<Py<Self>> {
        let fresh = Self {
            names: Arc::clone(&self.names),
            detach: self.detach,
            copy: self.copy,
            keep: self.keep,
            convert: self.convert.as_ref().map(|convert| convert.clone_ref(py)),
            gradients: self.gradients,
            max_bytes: self.max_bytes,
            shared_budget,
            stop: self.stop,
            inference: AtomicBool::new(self.inference.load(Ordering::Relaxed)),
            awaited: AtomicBool::new(false),
            store: Mutex::new(Store::of(self.names.len())),
        };
        Py::new(py, fresh)
    }

    /// Reads the last value of a name if it is a tensor that can be given out as it is stored: one that
    /// nobody changed, nobody copies, and that is no part of a batch.
    pub fn plain<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.convert.is_some() || self.awaited.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let tensor = {
            let store = self.store.lock();
            let Some(kept) = store.kept[index].back() else {
                return Ok(None);
            };
            let whole = !kept.shared && kept.rows.is_none() && kept.positions.is_none();
            match &*kept.tensors {
                [only] if whole && only.value.is(&kept.value) => only.stored(py),
                _ => return Ok(None),
            }
        };
        if !tensor.is_current()? {
            return Ok(None);
        }
        tensor.begin_read()?;
        Ok(Some(tensor.value))
    }

    /// True if all names have run.
    pub fn complete(&self) -> bool {
        self.store.lock().ran.len() == self.names.len()
    }

    /// Begins a call of the module to stop.
    pub fn begin_call(&self) {
        self.store.lock().calls.begin(FxHashSet::default());
    }

    /// Ends the latest call of the module to stop that this thread began.
    pub fn end_call(&self) {
        self.store.lock().calls.end();
    }

    /// Returns a number for the value of a call, by which its gradients find it.
    pub fn next_serial(&self) -> u64 {
        if !self.gradients {
            return 0;
        }
        let mut store = self.store.lock();
        store.serial += 1;
        store.serial
    }

    /// Stores the value of a call under a name.
    ///
    /// Raises:
    ///     CaptureBudgetError: it would exceed `max_bytes`.
    ///     Stop: all modules have run in this call of the model.
    pub fn store(&self, py: Python<'_>, index: usize, kept: Kept) -> PyResult<()> {
        let bytes = kept.bytes;
        match self.put(index, kept) {
            Put::OverBudget(_refused, budget) => Err(self.over_budget(py, index, bytes, &budget)),
            Put::Kept {
                ends_call: true, ..
            } => Err(Stop::new_err((self.stop, torch::stopped(py)?.unbind()))),
            Put::Kept { .. } => Ok(()),
        }
    }

    pub fn over_budget(
        &self,
        py: Python<'_>,
        index: usize,
        bytes: usize,
        &OverBudget(most): &OverBudget,
    ) -> PyErr {
        error::capture_budget(
            py,
            format!(
                "keeping {bytes} more bytes of {:?} would exceed max_bytes={most}: what was \
                 captured before stays readable",
                self.names[index]
            ),
        )
    }

    /// True if the bytes that it keeps alive are counted.
    pub fn counts(&self) -> bool {
        self.max_bytes.is_some() || self.shared_budget.is_some()
    }

    /// Returns the bytes of a tensor; 0 without a budget.
    pub fn bytes(&self, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
        if !self.counts() {
            return Ok(0);
        }
        tensor.getattr(intern!(tensor.py(), "nbytes"))?.extract()
    }

    fn put(&self, index: usize, kept: Kept) -> Put {
        let mut store = self.store.lock();
        let slot = &mut store.kept[index];
        let first = slot.is_empty();
        // The last value of a request in batches has all positions.
        let part_of_last = self.keep == 1 && kept.positions.is_some();
        let replaced = if slot.len() >= self.keep && !part_of_last {
            slot.pop_front()
        } else {
            None
        };
        let freed = replaced.as_ref().map_or(0, |oldest| oldest.bytes);
        let shared = self.shared_budget.as_deref();
        if let Err(over) = store.afford(kept.bytes, freed, self.max_bytes, shared) {
            if let Some(oldest) = replaced {
                store.kept[index].push_front(oldest);
            }
            return Put::OverBudget(kept, over);
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

    /// Stores a gradient with its tensor. Returns the gradient that it replaces.
    pub fn put_gradient(
        &self,
        slot: &TensorSlot,
        gradient: Gradient,
    ) -> Result<Option<Gradient>, OverBudget> {
        let mut store = self.store.lock();
        let calls = &store.kept[slot.index];
        let Some(at) = calls.iter().position(|kept| kept.serial == slot.serial) else {
            return Ok(None);
        };
        // A second backward brings another.
        let earlier = &calls[at].tensors[slot.position].gradient;
        let freed = earlier.as_ref().map_or(0, |gradient| gradient.bytes);
        let shared = self.shared_budget.as_deref();
        store.afford(gradient.bytes, freed, self.max_bytes, shared)?;
        let kept = &mut store.kept[slot.index][at];
        kept.bytes = kept.bytes - freed + gradient.bytes;
        Ok(kept.tensors[slot.position].gradient.replace(gradient))
    }

    /// Applies `convert` to a tensor.
    pub fn converted<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match &self.convert {
            Some(convert) => convert.bind(tensor.py()).call1((tensor,)),
            None => Ok(tensor.clone()),
        }
    }

    /// True if gradients are stored too.
    pub fn keeps_gradients(&self) -> bool {
        self.gradients
    }

    /// True if an operator in a graph can record for it: it stores detached tensors and no
    /// gradients.
    pub fn records_in_graph(&self) -> bool {
        self.detach && !self.gradients
    }

    /// True if values of many members of a batch can be stored together: tensors are stored as they
    /// are, without a graph.
    pub fn merges(&self) -> bool {
        self.records_in_graph() && self.convert.is_none()
    }

    /// True if reading a tensor checks its version.
    pub fn checks(&self) -> bool {
        self.copy == CopyMode::Checked
    }

    /// True if each value is copied.
    pub fn clones(&self) -> bool {
        self.copy == CopyMode::Clone
    }

    /// The names of the captured modules.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Prepares a tensor for storage: detached, converted or cloned.
    pub fn keep_tensor<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let mut kept = tensor.clone();
        // A tensor that requires no gradient is detached already.
        if self.detach && requires_grad(tensor)? {
            kept = kept.call_method0(intern!(py, "detach"))?;
        }
        if self.convert.is_some() {
            kept = self.converted(&kept)?;
        } else if self.copy == CopyMode::Clone {
            kept = kept.call_method0(intern!(py, "clone"))?;
        }
        Ok(kept)
    }

    /// Returns the tensor with its version, or a copy if it has no version counter.
    pub fn checked<'py>(
        &self,
        tensor: Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<i64>)> {
        if self.copy != CopyMode::Checked {
            return Ok((tensor, None));
        }
        let py = tensor.py();
        // Inference tensors have no version counter. A check is faster than raising and catching.
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

/// Result of storing a value. It owns what has to be dropped after the lock is released:
/// destructors of tensors run code.
enum Put {
    Kept {
        ends_call: bool,
        _replaced: Option<Kept>,
    },
    OverBudget(Kept, OverBudget),
}
