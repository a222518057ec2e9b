//! `Keeping`: stores one value in a collector, tensor by tensor, and its gradients later.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::capture::collector::Collector;
use crate::capture::store::{Gradient, Kept, KeptTensor, TensorSlot};
use crate::rows::places::TokenPositions;
use crate::torch::made::Order;
use crate::torch::tensors::{map_tensors, owned, requires_grad};

/// Stores `value` under a name; `shared`: its tensors may be views of those of a whole batch.
pub fn record<'py>(
    collector: &Bound<'py, Collector>,
    index: usize,
    value: &Bound<'py, PyAny>,
    positions: Option<TokenPositions>,
    shared: bool,
) -> PyResult<()> {
    let mut keeping = Keeping::of(collector, index, shared);
    let value = keeping.keep(value)?.unbind();
    let kept = Kept {
        serial: keeping.serial,
        value,
        tensors: keeping.tensors,
        bytes: keeping.bytes,
        shared,
        rows: None,
        positions,
    };
    collector.get().store(collector.py(), index, kept)
}

/// Conversion of one value for storage, tensor by tensor.
struct Keeping<'a, 'py> {
    collector: &'a Bound<'py, Collector>,
    index: usize,
    serial: u64,
    tensors: Vec<KeptTensor>,
    bytes: usize,
    shared: bool,
}

impl<'a, 'py> Keeping<'a, 'py> {
    fn of(collector: &'a Bound<'py, Collector>, index: usize, shared: bool) -> Self {
        Self {
            collector,
            index,
            serial: collector.get().next_serial(),
            tensors: Vec::new(),
            bytes: 0,
            shared,
        }
    }

    /// Rebuilds the structure around the stored tensors.
    fn keep(&mut self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        map_tensors(value, &mut |tensor| self.keep_tensor(tensor))
    }

    fn keep_tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let this = self.collector.get();
        let mut kept = this.keep_tensor(tensor)?;
        // What is counted is what is kept alive; and a copy made later may miss autograd's graph.
        if self.shared && (this.counts() || requires_grad(&kept)?) {
            kept = owned(&kept)?;
        }
        let (kept, version) = this.checked(kept)?;
        if this.keeps_gradients() && requires_grad(tensor)? {
            let slot = GradientSlot {
                collector: PyWeakrefReference::new(self.collector)?.unbind(),
                tensor: TensorSlot {
                    index: self.index,
                    serial: self.serial,
                    position: self.tensors.len(),
                },
            };
            tensor.call_method1(intern!(py, "register_hook"), (Bound::new(py, slot)?,))?;
        }
        self.bytes += this.bytes(&kept)?;
        self.tensors.push(KeptTensor {
            value: kept.clone().unbind(),
            version,
            gradient: None,
            order: Order::Any,
        });
        Ok(kept)
    }
}

/// Hook that receives the gradient of a stored tensor.
#[pyclass(frozen)]
pub struct GradientSlot {
    /// Weak: autograd's graph, which owns this, may outlive the capture or be part of it.
    collector: Py<PyWeakrefReference>,
    tensor: TensorSlot,
}

#[pymethods]
impl GradientSlot {
    fn __call__(&self, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = gradient.py();
        let Some(collector) = self.collector.bind(py).upgrade_as::<Collector>()? else {
            return Ok(());
        };
        let collector = collector.get();
        let mut gradient = collector.converted(gradient)?;
        // The tensor itself if possible: autograd accumulates in place only into unshared tensors.
        if requires_grad(&gradient)? {
            gradient = gradient.call_method0(intern!(py, "detach"))?;
        }
        let bytes = collector.bytes(&gradient)?;
        let gradient = Gradient {
            value: gradient.unbind(),
            bytes,
        };
        match collector.put_gradient(&self.tensor, gradient) {
            Ok(_replaced) => Ok(()),
            Err(over) => Err(collector.over_budget(py, self.tensor.index, bytes, &over)),
        }
    }
}
