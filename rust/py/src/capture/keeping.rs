//! `Keeping`: stores one value in a collector, tensor by tensor, and its gradients later.

use std::sync::{Arc, OnceLock};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::capture::collector::Collector;
use crate::capture::store::{Gradient, Kept, KeptTensor, TensorSlot};
use crate::error::shown;
use crate::hooks::native::Again;
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::rows::places::TokenPositions;
use crate::torch::made::StreamOrder;
use crate::torch::tensors::{
    for_each_tensor, map_tensors, owned, part_of, requires_grad, version_if_any,
};
use crate::torch::transforms;

/// Stores `value` under a name; `shared`: its tensors may be views of the tensors of a whole batch.
pub fn record<'py>(
    collector: &Bound<'py, Collector>,
    index: usize,
    value: &Bound<'py, PyAny>,
    positions: Option<TokenPositions>,
    shared: bool,
) -> PyResult<Keep> {
    let mut keeping = Keeping {
        collector,
        index,
        serial: collector.get().next_serial(),
        tensors: Vec::new(),
        bytes: 0,
        shared,
        tapped: Vec::new(),
    };
    // Rebuilds the structure around the stored tensors.
    let value = map_tensors(value, &mut |tensor| keeping.keep_tensor(tensor))?.unbind();
    let keep = Keep {
        serial: keeping.serial,
        tapped: keeping.tapped,
    };
    let kept = Kept {
        serial: keeping.serial,
        value,
        tensors: keeping.tensors,
        bytes: keeping.bytes,
        shared,
        rows: None,
        positions,
    };
    collector.get().store(collector.py(), index, kept)?;
    Ok(keep)
}

/// Takes the tokens of a value that are to be stored.
pub fn taken<'py>(
    collector: &Bound<'py, Collector>,
    index: usize,
    mask: &Mask,
    value: &Bound<'py, PyAny>,
    arguments: Option<CallArguments<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let this = collector.get();
    let describe = || format!("capture of {}", shown(&this.names()[index]));
    map_tensors(value, &mut |tensor| {
        if this.keeps_graph() || this.keeps_gradients() || !requires_grad(tensor)? {
            return mask.take(&describe, tensor, arguments);
        }
        // Taking them saves nothing for backward, which a repeat of the forward would have to save too.
        let detached = tensor.call_method0(intern!(tensor.py(), "detach"))?;
        mask.take(&describe, &detached, arguments)
    })
}

/// Form in which a value was stored.
pub struct Keep {
    serial: u64,
    /// True for each tensor whose gradient comes from the graph at hand; empty without gradients.
    tapped: Vec<bool>,
}

/// Stand-in for a recorder in the repeat of a checkpointed forward: stores nothing, and taps gradients.
pub struct KeepAgain {
    /// Weak: autograd's graph, which owns this, may outlive the capture or be part of it.
    collector: Py<PyWeakrefReference>,
    index: usize,
    /// `value[part]`, or the attribute of that name; None: the whole value.
    part: Option<Py<PyAny>>,
    keep: Keep,
    mask: Option<Arc<Mask>>,
}

impl KeepAgain {
    /// None if a repeat has nothing to do.
    pub fn of(
        collector: &Bound<'_, Collector>,
        index: usize,
        part: Option<&Py<PyAny>>,
        keep: Keep,
        mask: Option<Arc<Mask>>,
    ) -> PyResult<Option<Self>> {
        let this = collector.get();
        let gradients = this.keeps_gradients() && (mask.is_some() || keep.tapped.contains(&false));
        if !(gradients || this.keeps_graph()) {
            return Ok(None);
        }
        Ok(Some(Self {
            collector: PyWeakrefReference::new(collector)?.unbind(),
            index,
            part: part.map(|part| part.clone_ref(collector.py())),
            keep,
            mask,
        }))
    }
}

impl Again for KeepAgain {
    /// Taps the gradients of the recomputed tensors, since the forward's own will get none.
    fn run<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Option<Arc<dyn Again>>> {
        let py = value.py();
        let Some(collector) = self.collector.bind(py).upgrade_as::<Collector>()? else {
            return Ok(None);
        };
        let index = self.index;
        let mut value = match &self.part {
            Some(part) => part_of(value, part.bind(py))?,
            None => value.clone(),
        };
        if let Some(mask) = &self.mask {
            let arguments = Some(CallArguments { args, kwargs });
            value = taken(&collector, index, mask, &value, arguments)?;
        }
        let mut tapped = Vec::new();
        for_each_tensor(&value, &mut |tensor| {
            if collector.get().keeps_graph() {
                // Save the forward's saved tensors again.
                drop(collector.get().keep_tensor(index, tensor)?);
            }
            let position = tapped.len();
            let mut taps = self.keep.tapped.get(position).copied().unwrap_or_default();
            if !taps && collector.get().keeps_gradients() {
                let slot = TensorSlot {
                    index,
                    serial: self.keep.serial,
                    position,
                };
                taps = tap(&collector, slot, tensor)?;
            }
            tapped.push(taps);
            Ok(())
        })?;
        let serial = self.keep.serial;
        let keep = Keep { serial, tapped };
        let mask = self.mask.clone();
        let next = Self::of(&collector, index, self.part.as_ref(), keep, mask)?;
        Ok(next.map(|next| Arc::new(next) as _))
    }
}

/// Registers a gradient of a tensor to be stored. Returns false if it will get none.
fn tap(
    collector: &Bound<'_, Collector>,
    slot: TensorSlot,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    if !requires_grad(tensor)? {
        return Ok(false);
    }
    let py = tensor.py();
    let slot = GradientSlot {
        collector: PyWeakrefReference::new(collector)?.unbind(),
        tensor: slot,
        removal: OnceLock::new(),
    };
    let slot = Bound::new(py, slot)?;
    let handle = tensor.call_method1(intern!(py, "register_hook"), (&slot,))?;
    if tensor.getattr(intern!(py, "grad_fn"))?.is_none() {
        let handle = handle.unbind();
        let remove = move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
            handle.call_method0(args.py(), "remove").map(drop)
        };
        let remove = PyCFunction::new_closure(py, None, None, remove)?;
        let removal = PyWeakrefReference::new_with(collector, remove)?;
        let _ = slot.get().removal.set(removal.unbind());
    }
    Ok(true)
}

/// Conversion of one value for storage, tensor by tensor.
struct Keeping<'a, 'py> {
    collector: &'a Bound<'py, Collector>,
    index: usize,
    serial: u64,
    tensors: Vec<KeptTensor>,
    bytes: usize,
    shared: bool,
    tapped: Vec<bool>,
}

impl<'py> Keeping<'_, 'py> {
    fn keep_tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let this = self.collector.get();
        let mut kept = this.keep_tensor(self.index, tensor)?;
        // The byte count covers the memory kept alive; and a later copy may miss autograd's graph.
        if self.shared && (this.counts() || requires_grad(&kept)?) {
            kept = owned(&kept)?;
        }
        let (kept, stored, version) = versioned(this, kept)?;
        let mut recorded = false;
        if this.keeps_gradients() {
            let slot = TensorSlot {
                index: self.index,
                serial: self.serial,
                position: self.tensors.len(),
            };
            recorded = tap(self.collector, slot, tensor)?;
            self.tapped.push(recorded);
        }
        self.bytes += this.bytes(&stored)?;
        self.tensors.push(KeptTensor {
            value: stored.unbind(),
            version,
            gradient: None,
            recorded,
            order: StreamOrder::Any,
        });
        Ok(kept)
    }
}

/// Returns a tensor as it is stored, the one with its memory, and the version if reading checks that.
fn versioned<'py>(
    collector: &Collector,
    tensor: Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Option<i64>)> {
    let (mut kept, mut version) = collector.checked(tensor)?;
    let mut stored = kept.clone();
    if transforms::active(kept.py())? {
        // The tensor inside outlives the transform, and writes in place go to it.
        stored = transforms::physical(&kept)?;
        // A tensor in `vmap` does not say that the one inside requires a gradient.
        if !collector.keeps_graph() && requires_grad(&stored)? {
            kept = kept.call_method0(intern!(kept.py(), "detach"))?;
            stored = transforms::physical(&kept)?;
        }
        collector.note_transform();
        if version.is_some() {
            version = version_if_any(&stored)?;
        }
    }
    Ok((kept, stored, version))
}

/// Hook that receives the gradient of a stored tensor.
#[pyclass(frozen)]
pub struct GradientSlot {
    /// Weak: autograd's graph, which owns this, may outlive the capture or be part of it.
    collector: Py<PyWeakrefReference>,
    tensor: TensorSlot,
    /// Its callback removes the hook from a tensor without a graph, as a parameter: one that outlives
    /// many captures.
    removal: OnceLock<Py<PyWeakrefReference>>,
}

#[pymethods]
impl GradientSlot {
    fn __call__(&self, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = gradient.py();
        // None: gradients reached other outputs of the same node of the graph.
        if gradient.is_none() {
            return Ok(());
        }
        let Some(collector) = self.collector.bind(py).upgrade_as::<Collector>()? else {
            return Ok(());
        };
        let collector = collector.get();
        let mut gradient = collector.converted(gradient)?;
        // The tensor itself if possible: autograd accumulates in place only into unshared tensors.
        if requires_grad(&gradient)? {
            gradient = gradient.call_method0(intern!(py, "detach"))?;
        }
        let (gradient, stored, version) = versioned(collector, transforms::unbatched(gradient)?)?;
        let bytes = collector.bytes(&stored)?;
        let gradient = Gradient {
            passes: vec![(gradient.unbind(), version)],
            bytes,
        };
        match collector.put_gradient(&self.tensor, gradient) {
            Ok(_dropped) => Ok(()),
            Err(over) => Err(collector.over_budget(py, self.tensor.index, bytes, &over)),
        }
    }
}
