//! Storage of one value for many members of a batch: one reference, or one selection of rows, that
//! each reads its own rows of.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;

use crate::capture::collector::Collector;
use crate::capture::store::{Kept, KeptRows, KeptTensor};
use crate::hooks::native::{Part, SharedValue};
use crate::torch::rows::Rows;
use crate::torch::tensors::{map_tensors, requires_grad, version};

/// A value as the members share it.
pub struct Together<'py> {
    value: Bound<'py, PyAny>,
    tensors: Vec<(Bound<'py, PyAny>, Option<i64>, bool)>,
    /// True if it is a selection of the members' rows, one member behind the other.
    selected: bool,
    size: usize,
}

impl<'py> Together<'py> {
    /// Takes the rows of some parts from a value; `copy`: a copy of them in any case.
    pub fn of(
        parts: &[&Part<'_, 'py>],
        shared: &SharedValue<'_, 'py>,
        value: &Bound<'py, PyAny>,
        copy: bool,
    ) -> PyResult<Self> {
        let selection = shared.select(parts);
        let rows = &selection.rows;
        // A reference to a tensor most of which is of others would keep that alive.
        let mut selected = copy || shared.written || 2 * rows.len() < shared.size;
        let mut tensors = Vec::new();
        let mut versions_missing = false;
        map_tensors(value, &mut |tensor| {
            versions_missing |= version(tensor).is_err();
            Ok(tensor.clone())
        })?;
        selected |= versions_missing;
        let value = map_tensors(value, &mut |tensor| {
            let py = tensor.py();
            let mut kept = tensor.clone();
            if requires_grad(tensor)? {
                kept = kept.call_method0(intern!(py, "detach"))?;
            }
            let covered = shared.covers(tensor)?;
            if selected && covered {
                kept = rows.narrow(&kept, shared.dim)?;
            }
            if selected && !(covered && rows.copies()) {
                kept = kept.call_method0(intern!(py, "clone"))?;
            }
            tensors.push((kept.clone(), version(&kept).ok(), covered));
            Ok(kept)
        })?;
        let size = if selected { rows.len() } else { shared.size };
        Ok(Self {
            value,
            tensors,
            selected,
            size,
        })
    }

    /// Stores the rows of a part, `start` rows behind those of the first part.
    pub fn store(
        &self,
        collector: &Bound<'py, Collector>,
        index: usize,
        part: &Part<'_, 'py>,
        start: usize,
        dim: usize,
    ) -> PyResult<()> {
        let this = collector.get();
        let length = part.rows.len();
        let rows = if self.selected {
            Rows::Range { start, length }
        } else {
            (*part.rows).clone()
        };
        let mut bytes = 0;
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (tensor, version, covered) in &self.tensors {
            let all = this.bytes(tensor)?;
            bytes += if *covered {
                all / self.size.max(1) * length
            } else {
                all
            };
            tensors.push(KeptTensor {
                value: tensor.clone().unbind(),
                version: version.filter(|_| this.checks()),
                gradient: None,
            });
        }
        let kept = Kept {
            serial: this.next_serial(),
            value: self.value.clone().unbind(),
            tensors,
            bytes,
            rows: Some(Arc::new(KeptRows {
                rows,
                dim,
                size: self.size,
            })),
            positions: part.positions.clone(),
        };
        this.store(collector.py(), index, kept)
    }
}
