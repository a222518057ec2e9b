//! Tensors that are made once and used by many calls, on whichever streams of a GPU these run.

use std::iter::successors;
use std::sync::OnceLock;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Orders the uses of tensors after the kernels that made them.
pub enum StreamOrder {
    /// The tensors are not on a GPU, or their users know when they were made.
    Any,
    /// A `ferrohook.util.streams.Made`.
    After(Py<PyAny>),
}

impl StreamOrder {
    /// Order of tensors of one device that were made just now. None if they are part of a CUDA graph
    /// that is being captured, and must not be used by later calls.
    pub fn of(tensors: &Bound<'_, PyTuple>) -> PyResult<Option<Self>> {
        let py = tensors.py();
        let Ok(first) = tensors.get_item(0) else {
            return Ok(Some(Self::Any));
        };
        if !first.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            return Ok(Some(Self::Any));
        }
        let streams = py.import(intern!(py, "ferrohook.util.streams"))?;
        let made = streams.call_method1(intern!(py, "made"), (tensors,))?;
        Ok((!made.is_none()).then(|| Self::After(made.unbind())))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Any => Ok(()),
            Self::After(made) => visit.call(made),
        }
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::After(made) => Self::After(made.clone_ref(py)),
        }
    }

    /// Makes later work of the current stream wait for the kernels that made the tensors.
    pub fn begin_use(&self, py: Python<'_>) -> PyResult<()> {
        if let Self::After(made) = self {
            made.call_method0(py, intern!(py, "use"))?;
        }
        Ok(())
    }
}

/// Tensors that were made when they were first needed, each for a key. A list that only grows, read
/// without a lock: comparing devices runs Python code.
pub struct MadeTensors<K>(OnceLock<Box<Made<K>>>);

struct Made<K> {
    key: K,
    tensor: Py<PyAny>,
    order: StreamOrder,
    others: MadeTensors<K>,
}

impl<K> Default for MadeTensors<K> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<K> MadeTensors<K> {
    fn iter(&self) -> impl Iterator<Item = &Made<K>> {
        successors(self.0.get(), |made| made.others.0.get()).map(Box::as_ref)
    }

    /// Returns the tensor for a key, for use on the current stream; None if it is to be made.
    pub fn find<'py>(
        &self,
        py: Python<'py>,
        is_it: impl Fn(&K) -> PyResult<bool>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        for made in self.iter() {
            if is_it(&made.key)? {
                made.order.begin_use(py)?;
                return Ok(Some(made.tensor.bind(py).clone()));
            }
        }
        Ok(None)
    }

    /// Adds a tensor that was made just now, unless later calls must not use it.
    pub fn add(&self, key: K, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(order) = StreamOrder::of(&PyTuple::new(tensor.py(), [tensor])?)? {
            let mut slot = &self.0;
            let mut made = Box::new(Made {
                key,
                tensor: tensor.clone().unbind(),
                order,
                others: Self::default(),
            });
            while let Err(refused) = slot.set(made) {
                made = refused;
                slot = &slot.wait().others.0;
            }
        }
        Ok(())
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.iter().try_for_each(|made| visit.call(&made.tensor))
    }
}

/// Keeps the memory of a tensor that is about to be read until the current stream is done with it,
/// if it is on a GPU.
pub fn read(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        py.import(intern!(py, "ferrohook.util.streams"))?
            .call_method1(intern!(py, "read"), (tensor,))?;
    }
    Ok(())
}
