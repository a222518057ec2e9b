//! `Collector`: stores the values of one capture, by its options.

use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustc_hash::FxHashSet;

use crate::call::stop::Stop;
use crate::capture::joining::Joined;
use crate::capture::store::{
    Budget, Gradient, Kept, KeptTensor, OverBudget, Store, TensorSlot, Values, View,
};
use crate::error;
use crate::rows::places::{Position, TokenPositions, shared_row};
use crate::torch;
use crate::torch::tensors::{is_inference, requires_grad, version};
use crate::torch::transforms;

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
    /// True if tokens of several calls, where their positions are known, count as those of one.
    joins: bool,
    /// Applied to each tensor, and to each gradient.
    convert: Option<Py<PyAny>>,
    /// Dtypes to which integers are cast, by the index of their name.
    casts: Option<Py<PyDict>>,
    gradients: bool,
    max_bytes: Option<usize>,
    /// Budget that it shares with other collectors of a request.
    shared_budget: Option<Arc<Budget>>,
    /// Id of the registry of the module whose call ends once all names have run.
    stop: Option<u64>,
    inference: AtomicBool,
    /// True once captures may be in transit from a GPU; the first reader waits for them.
    awaited: AtomicBool,
    /// True once a value of a transform of `torch.func` was stored.
    transformed: AtomicBool,
    store: Mutex<Store>,
}

#[pymethods]
impl Collector {
    #[new]
    #[pyo3(signature = (names, *, detach, copy, keep, convert, grads, max_bytes, stop, casts = None, joins = false))]
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
        casts: Option<Py<PyDict>>,
        joins: bool,
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
            joins,
            convert,
            casts,
            gradients: grads,
            max_bytes,
            shared_budget: None,
            stop,
            inference: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            transformed: AtomicBool::new(false),
            store,
        })
    }

    /// Indices of the names that ran, in the order of their first calls.
    fn ran(&self) -> Vec<usize> {
        self.store.lock().ran.clone()
    }

    /// Reads the values of the calls of a name, the oldest first; with `joins`, the tokens of all of them
    /// as one value, if their positions are known. They share no memory with rows of other requests,
    /// but with `stale`, which is for sizes and shapes. One call, so that no step comes between.
    ///
    /// `finish`: waits until the values can be read.
    ///
    /// Raises:
    ///     StaleActivationError: a tensor was changed in place since; `stale` allows that.
    #[pyo3(signature = (index, *, joins = false, stale = false, finish = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        joins: bool,
        stale: bool,
        finish: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let views = self.views(py, index);
        if let Some(finish) = finish {
            finish.call0()?;
        }
        for view in &views {
            if !stale && !view.is_current()? {
                return Err(self.changed_in_place(py, index, ""));
            }
            view.begin_read()?;
        }
        if joins && let Some(joined) = Joined::of(&views)? {
            if !stale {
                self.replace(index, &views, &joined)?;
            }
            return Ok(vec![joined.value]);
        }
        let read = views.iter().map(|view| {
            if view.shared && !stale {
                return view.owned(index, &self.store, self.checks());
            }
            view.narrowed()
        });
        read.collect()
    }

    /// Number of calls of a name so far, and number of those whose values made way for later ones.
    fn counts_of(&self, index: usize) -> (usize, usize) {
        let store = self.store.lock();
        (store.kept[index].count, store.kept[index].dropped)
    }

    /// Positions of all tokens of these values, row by row, in order; None if the positions of one
    /// value are unknown.
    fn tokens(&self, index: usize) -> Option<Vec<i64>> {
        let store = self.store.lock();
        let mut found = Vec::new();
        for kept in &store.kept[index].calls {
            found.extend(kept.positions.as_ref()?.tokens().flatten());
        }
        drop(store);
        found.sort_unstable();
        found.dedup();
        Some(found.into_iter().map(|(_, position)| position.0).collect())
    }

    /// Gradients of the result of `values`: a list for each call, with an entry for each of its
    /// tensors, which lists one gradient for each backward pass that reached it.
    ///
    /// Raises:
    ///     StaleActivationError: a gradient was changed in place since; `stale` allows that.
    #[pyo3(signature = (index, *, stale = false))]
    fn gradients<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        stale: bool,
    ) -> PyResult<Vec<Vec<Vec<Bound<'py, PyAny>>>>> {
        let mut versions = Vec::new();
        let found: Vec<Vec<Vec<_>>> = {
            let store = self.store.lock();
            let mut gradient = |tensor: &KeptTensor| {
                let passes = tensor.gradient.iter().flat_map(|it| &it.passes);
                let passes = passes.map(|(it, version)| {
                    versions.extend(version.map(|version| (it.bind(py).clone(), version)));
                    it.bind(py).clone()
                });
                passes.collect()
            };
            let calls = store.kept[index].calls.iter();
            calls
                .map(|kept| kept.tensors.iter().map(&mut gradient).collect())
                .collect()
        };
        for (gradient, stored) in versions {
            if !stale && version(&transforms::physical(&gradient)?)? != stored {
                return Err(self.changed_in_place(py, index, "the gradient of "));
            }
        }
        Ok(found)
    }

    /// True if a value may be a tensor of a transform of `torch.func` that has ended.
    #[getter]
    fn transformed(&self) -> bool {
        // Relaxed: readers know of the call that stored here.
        self.transformed.load(Ordering::Relaxed)
    }

    /// True if autograd recorded one of the tensors of `values`, so that a gradient may come.
    fn awaits_gradients(&self, index: usize) -> bool {
        let store = self.store.lock();
        let mut tensors = store.kept[index]
            .calls
            .iter()
            .flat_map(|kept| &kept.tensors);
        tensors.any(|tensor| tensor.recorded)
    }

    /// Makes readers ask Python for values, which may have to wait for a GPU first.
    fn await_values(&self) {
        // Relaxed: readers know of the batch that was left here.
        self.awaited.store(true, Ordering::Relaxed);
    }

    /// Takes back the rows of tokens from a position on, of values joined by position:
    /// drafts that were rejected. `sequences`: id of their sequences, the values of others stay.
    /// `but`: indices of names that are of other tokens.
    fn take_back(&self, position: i64, sequences: u64, but: Vec<usize>) {
        if !self.joins {
            return;
        }
        let mut gone = Vec::new();
        let mut store = self.store.lock();
        for index in (0..self.names.len()).filter(|index| !but.contains(index)) {
            if !store.kept[index].are_of(sequences) {
                continue;
            }
            let replacing = store.kept[index].taken_back(Position(position));
            let shared = self.shared_budget.as_deref();
            // It only frees.
            drop(store.afford(0, replacing.freed, self.max_bytes, shared));
            gone.push(store.kept[index].take_back(Position(position), replacing));
            if store.kept[index].calls.is_empty() {
                store.kept[index] = Values::default();
                store.ran.retain(|ran| *ran != index);
            }
        }
        // Dropped after the lock is released: destructors of tensors run code.
        drop(store);
        drop(gone);
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
        visit.call(&self.casts)?;
        for kept in self.store.lock().kept.iter().flat_map(|it| &it.calls) {
            visit.call(&kept.value)?;
            for each in &kept.tensors {
                visit.call(&each.value)?;
                each.order.traverse(&visit)?;
                let mut passes = each.gradient.iter().flat_map(|it| &it.passes);
                passes.try_for_each(|(gradient, _)| visit.call(gradient))?;
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
            joins: self.joins,
            convert: self.convert.as_ref().map(|convert| convert.clone_ref(py)),
            casts: self.casts.as_ref().map(|casts| casts.clone_ref(py)),
            gradients: self.gradients,
            max_bytes: self.max_bytes,
            shared_budget,
            stop: self.stop,
            inference: AtomicBool::new(self.inference.load(Ordering::Relaxed)),
            awaited: AtomicBool::new(false),
            transformed: AtomicBool::new(false),
            store: Mutex::new(Store::of(self.names.len())),
        };
        Py::new(py, fresh)
    }

    /// Reads the last value of a name if it can be returned as stored: an unchanged tensor that needs
    /// no copy and is no part of a batch.
    pub fn plain<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        // Converted ones may be on their way from a GPU.
        if self.convert.is_some() || self.awaited.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let tensor = {
            let store = self.store.lock();
            let Some(kept) = store.kept[index].calls.back() else {
                return Ok(None);
            };
            let positions = kept.positions.as_ref();
            let in_order =
                positions.is_none_or(|it| store.kept[index].calls.len() == 1 && it.in_order());
            let whole = !kept.shared && kept.rows.is_none() && in_order;
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

    /// Returns a serial number for the value of a call; its gradients find the value with it.
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
        let positions = kept.positions.as_ref().filter(|_| self.joins());
        if let Some(position) = positions.and_then(TokenPositions::repeated) {
            let who = format!("capture of {}", error::shown(&self.names[index]));
            let message = shared_row(&who, position) + ", or pass calls=\"all\"";
            return Err(error::hook_error(py, message));
        }
        let bytes = kept.bytes;
        let (ends_call, sparse) = match self.put(py, index, kept) {
            Put::OverBudget(_refused, budget) => {
                return Err(self.over_budget(py, index, bytes, &budget));
            }
            Put::Kept {
                ends_call, sparse, ..
            } => (ends_call, sparse),
        };
        for view in &sparse {
            self.shrink(index, view)?;
        }
        if ends_call {
            return Err(Stop::new_err((self.stop, torch::stopped(py)?.unbind())));
        }
        Ok(())
    }

    /// Takes what can be read of the calls of a name.
    fn views<'py>(&self, py: Python<'py>, index: usize) -> Vec<View<'py>> {
        let store = self.store.lock();
        store.kept[index]
            .calls
            .iter()
            .map(|kept| kept.view(py))
            .collect()
    }

    /// Stores a joined value in place of its parts: they are joined once, and the tensors of the
    /// batches are released.
    fn replace(&self, index: usize, views: &[View<'_>], joined: &Joined<'_>) -> PyResult<()> {
        // A gradient finds its tensor by its call.
        if self.gradients || !joined.copied {
            return Ok(());
        }
        let Some(tensors) = joined.kept(self.checks())? else {
            return Ok(());
        };
        // Dropped after the lock is released: destructors of tensors run code.
        let _gone = self.store.lock().kept[index].join(views, joined, tensors);
        Ok(())
    }

    /// Copies the remaining tokens of a call, to release the memory of tokens that ran again.
    fn shrink(&self, index: usize, view: &View<'_>) -> PyResult<()> {
        // Not a changed value, whose reader gets an error; nor one in transit from a GPU.
        if self.convert.is_some() || !view.is_current()? {
            return Ok(());
        }
        view.begin_read()?;
        let views = slice::from_ref(view);
        match Joined::of(views)? {
            Some(joined) => self.replace(index, views, &joined),
            None => Ok(()),
        }
    }

    fn changed_in_place(&self, py: Python<'_>, index: usize, what: &str) -> PyErr {
        error::stale_activation(
            py,
            format!(
                "{what}{} was changed in place after it was captured: capture with copy=\"clone\" \
                 to keep the original values",
                error::shown(&self.names[index])
            ),
        )
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
                "keeping {bytes} more bytes of {} would exceed max_bytes={most}: earlier captures \
                 stay readable",
                error::shown(&self.names[index])
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
        let py = tensor.py();
        let tensors = py.import(intern!(py, "ferrohook.util.tensors"))?;
        let bytes = tensors.call_method1(intern!(py, "nbytes"), (tensor,))?;
        bytes.extract()
    }

    fn put<'py>(&self, py: Python<'py>, index: usize, kept: Kept) -> Put<'py> {
        let mut store = self.store.lock();
        let replacing = store.kept[index].replaced_by(&kept, self.keep, self.joins);
        let shared = self.shared_budget.as_deref();
        if let Err(over) = store.afford(kept.bytes, replacing.freed, self.max_bytes, shared) {
            return Put::OverBudget(kept, over);
        }
        if store.kept[index].count == 0 {
            store.ran.push(index);
        }
        let partial = replacing.is_partial();
        let former = store.kept[index].put(kept, replacing);
        let mut sparse = Vec::new();
        if partial {
            let calls = store.kept[index].calls.iter();
            sparse.extend(calls.filter(|it| it.is_sparse()).map(|it| it.view(py)));
        }
        Put::Kept {
            ends_call: self.stop.is_some() && store.ends_call(index, self.names.len()),
            sparse,
            _former: former,
        }
    }

    /// Stores the gradient of one backward pass with its tensor. Returns a gradient whose value is
    /// gone, to be dropped.
    pub fn put_gradient(
        &self,
        slot: &TensorSlot,
        gradient: Gradient,
    ) -> Result<Option<Gradient>, OverBudget> {
        let mut store = self.store.lock();
        let calls = &store.kept[slot.index].calls;
        let Some(at) = calls.iter().position(|kept| kept.serial == slot.serial) else {
            return Ok(Some(gradient));
        };
        let shared = self.shared_budget.as_deref();
        store.afford(gradient.bytes, 0, self.max_bytes, shared)?;
        let kept = &mut store.kept[slot.index].calls[at];
        kept.bytes += gradient.bytes;
        match &mut kept.tensors[slot.position].gradient {
            Some(earlier) => {
                earlier.bytes += gradient.bytes;
                earlier.passes.extend(gradient.passes);
            }
            none => *none = Some(gradient),
        }
        Ok(None)
    }

    /// Applies `convert` to a tensor, or else copies it if each value is copied.
    pub fn converted<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match &self.convert {
            Some(convert) => convert.bind(tensor.py()).call1((tensor,)),
            None if self.clones() => tensor.call_method0(intern!(tensor.py(), "clone")),
            None => Ok(tensor.clone()),
        }
    }

    /// Marks that a value of a transform of `torch.func` is stored.
    pub fn note_transform(&self) {
        self.transformed.store(true, Ordering::Relaxed);
    }

    /// True if gradients are stored too.
    pub fn keeps_gradients(&self) -> bool {
        self.gradients
    }

    /// True if tensors are stored with autograd's graph.
    pub fn keeps_graph(&self) -> bool {
        !self.detach
    }

    /// True if an operator in a graph can record for it: it stores detached tensors and no
    /// gradients.
    pub fn records_in_graph(&self) -> bool {
        self.detach && !self.gradients
    }

    /// True if values of many members of a batch can be stored together: tensors are stored as they
    /// are, without a graph.
    pub fn merges(&self) -> bool {
        self.records_in_graph() && self.convert.is_none() && self.casts.is_none()
    }

    /// True if the tokens of several calls are read as one value, where their positions are known. Not
    /// with gradients, which belong to one call.
    pub fn joins(&self) -> bool {
        self.joins && !self.gradients
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

    /// Prepares a tensor of a name for storage: detached, cast, converted or cloned.
    pub fn keep_tensor<'py>(
        &self,
        index: usize,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let mut kept = tensor.clone();
        // A tensor that requires no gradient is detached already.
        if self.detach && requires_grad(tensor)? {
            kept = kept.call_method0(intern!(py, "detach"))?;
        }
        if let Some(casts) = &self.casts
            && let Some(dtype) = casts.bind(py).get_item(index)?
        {
            kept = kept.call_method1(intern!(py, "to"), (dtype,))?;
        }
        self.converted(&kept)
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
        if self.inference.load(Ordering::Relaxed) && is_inference(&tensor)? {
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
enum Put<'py> {
    Kept {
        ends_call: bool,
        /// Values most of whose tokens ran again.
        sparse: Vec<View<'py>>,
        _former: Vec<Kept>,
    },
    OverBudget(Kept, OverBudget),
}
