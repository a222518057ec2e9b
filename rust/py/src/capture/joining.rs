//! Tokens of the steps of a request as one tensor.

use std::collections::VecDeque;

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::capture::store::{Kept, KeptRows, KeptTensor, Store, StoredTensor};
use crate::rows::numbers::length;
use crate::rows::places::{Position, TokenPositions};
use crate::torch::facts::Facts;
use crate::torch::tensors::outside_inference;

/// Values of the steps of a name: tensors with a row for each token, later ones behind earlier ones.
pub struct Steps<'py> {
    parts: Vec<Step<'py>>,
    positions: Vec<Position>,
    /// Dimension of the tokens.
    dim: usize,
    bytes: usize,
}

struct Step<'py> {
    tensor: StoredTensor<'py>,
    rows: Option<KeptRows>,
    tokens: usize,
    shared: bool,
}

impl<'py> Steps<'py> {
    /// Returns those of the stored calls; None if they are not of this kind.
    pub fn of(py: Python<'py>, calls: &VecDeque<Kept>) -> Option<Self> {
        let dim = calls.front()?.positions.as_ref()?.dim?;
        let mut found = Self {
            parts: Vec::with_capacity(calls.len()),
            positions: Vec::new(),
            dim,
            bytes: 0,
        };
        for kept in calls {
            let positions = kept.positions.as_ref().filter(|it| it.dim == Some(dim))?;
            let [tensor] = &*kept.tensors else {
                return None;
            };
            let others = kept.rows.as_ref().is_some_and(|rows| rows.dim != dim);
            if others || !tensor.value.is(&kept.value) {
                return None;
            }
            found.positions.extend_from_slice(&positions.values);
            found.bytes += kept.bytes;
            found.parts.push(Step {
                tensor: tensor.stored(py),
                rows: kept.rows.clone(),
                tokens: positions.values.len(),
                shared: kept.shared,
            });
        }
        let first = found.positions.first()?;
        let ordered = found.positions.is_sorted_by(|one, next| one.0 < next.0);
        (first.0 >= 0 && ordered).then_some(found)
    }

    /// Joins them, and stores the result in place of theirs: it is made once, and the tensors of the
    /// batches are released. None if a tensor is not as it was stored; `checks`: reading it again checks
    /// that too.
    pub fn join(
        self,
        index: usize,
        store: &Mutex<Store>,
        checks: bool,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.parts[0].tensor.value.py();
        let mut tensors = Vec::with_capacity(self.parts.len());
        for step in &self.parts {
            let Some(tensor) = step.of_tokens(self.dim)? else {
                return Ok(None);
            };
            tensors.push(tensor);
        }
        if let ([only], [step]) = (&*tensors, &*self.parts)
            && !step.shared
            && self.dim == 0
        {
            return Ok(Some(only.clone()));
        }
        let joined = outside_inference(py, || {
            let torch = py.import(intern!(py, "torch"))?;
            let tensors = PyList::new(py, tensors)?;
            torch.call_method1(intern!(py, "cat"), (tensors,))
        })?;
        if let Some(copy) = KeptTensor::copied(&joined, checks)? {
            // Dropped after the lock is released: destructors of tensors run code.
            let _former = self.replace(index, store, copy);
        }
        Ok(Some(joined))
    }

    /// Stores one tensor in place of those of the steps, if these are stored still. Returns them.
    fn replace(self, index: usize, store: &Mutex<Store>, joined: KeptTensor) -> Option<Vec<Kept>> {
        let mut store = store.lock();
        let calls = &mut store.kept[index];
        let stored = calls.iter().zip(&self.parts);
        let same = stored.filter(|(kept, step)| kept.value.is(&step.tensor.value));
        if same.count() < self.parts.len() {
            return None;
        }
        let former = calls.drain(..self.parts.len()).collect();
        calls.push_front(Kept {
            serial: 0, // for gradients, which a request in a batch has none of
            value: joined.value.clone_ref(self.parts[0].tensor.value.py()),
            tensors: vec![joined],
            bytes: self.bytes,
            shared: false,
            rows: None,
            positions: Some(TokenPositions {
                values: self.positions.into(),
                dim: Some(0),
            }),
        });
        Some(former)
    }
}

impl<'py> Step<'py> {
    /// Returns a tensor of (tokens, ...), which may share memory with others; None if it has not one for
    /// each position, or was changed in place.
    fn of_tokens(&self, dim: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = &self.tensor.value;
        let size = self.rows.as_ref().map_or(self.tokens, |rows| rows.size);
        let one_row = || PyResult::Ok(dim == 1 && length(tensor, 0)? == Some(1));
        let having = self.rows.as_ref().is_none_or(|rows| rows.covered[0]);
        if !Facts::is_plain(tensor)?
            || !having
            || length(tensor, dim)? != Some(size)
            || !(dim == 0 || one_row()?)
        {
            return Ok(None);
        }
        if !self.tensor.is_current()? {
            return Ok(None);
        }
        self.tensor.begin_read()?;
        let tensor = match dim {
            0 => tensor.clone(),
            _ => tensor.get_item(0)?,
        };
        let Some(KeptRows { rows, .. }) = &self.rows else {
            return Ok(Some(tensor));
        };
        if rows.len() != self.tokens {
            return Ok(None);
        }
        if rows.all(size) {
            return Ok(Some(tensor));
        }
        rows.narrow(&tensor, 0).map(Some)
    }
}
