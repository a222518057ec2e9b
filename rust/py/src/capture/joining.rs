//! Tokens of the calls of a request as one value.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::capture::store::{Kept, KeptTensor, Values, View};
use crate::error::{caused, hook_error};
use crate::rows::numbers::{Rows, length};
use crate::rows::places::{Token, TokenDims, TokenPositions};
use crate::torch::tensors::{
    copied, map_tensors, outside_inference, owned, same_places, tensors_of,
};

/// Value joined from many calls: tensors with a row for each token, in order of position. Parts
/// without tokens come from the last call.
pub struct Joined<'py> {
    pub value: Bound<'py, PyAny>,
    positions: TokenPositions,
    tensors: Vec<Bound<'py, PyAny>>,
    /// True if each of its tensors is a copy that has all tokens.
    pub copied: bool,
}

/// Rows of tensors that are joined, one call after the other.
struct JoinOrder {
    /// Row of each token, in order of position.
    rows: Vec<usize>,
    tokens: Vec<Token>,
}

impl JoinOrder {
    /// Joins calls; of tokens that ran twice, the last one counts.
    fn of(calls: &[&TokenPositions]) -> Self {
        let tokens = calls.iter().flat_map(|call| call.tokens()).enumerate();
        let mut found: Vec<_> = tokens.filter_map(|(row, it)| Some((it?, row))).collect();
        found.sort_unstable_by_key(|(token, row)| (*token, std::cmp::Reverse(*row)));
        found.dedup_by_key(|(token, _)| *token);
        let (tokens, rows) = found.into_iter().unzip();
        Self { rows, tokens }
    }
}

impl<'py> Joined<'py> {
    /// Joins the values of some calls; None if the positions of one are not known.
    pub fn of(views: &[View<'py>]) -> PyResult<Option<Self>> {
        let calls = views.iter().map(|view| view.positions.as_ref());
        let Some(calls) = calls.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let Some((last, first)) = views.last().zip(calls.first()) else {
            return Ok(None);
        };
        let order = JoinOrder::of(&calls);
        let values = views.iter().map(View::narrowed);
        let values = values.collect::<PyResult<Vec<_>>>()?;
        let columns = values
            .iter()
            .map(tensors_of)
            .collect::<PyResult<Vec<_>>>()?;
        let latest = &values[views.len() - 1];
        for value in &values[..views.len() - 1] {
            if !same_places(value, latest)? {
                let message = "the calls returned tensors at different places, which are not \
                               joined: pass calls=\"all\", or output_index= for one of them";
                return Err(hook_error(latest.py(), message));
            }
        }
        let (mut at, mut tensors, mut all) = (0, Vec::new(), !columns[0].is_empty());
        let value = map_tensors(latest, &mut |tensor| {
            let mut parts = Vec::with_capacity(views.len());
            for ((view, leaves), positions) in views.iter().zip(&columns).zip(&calls) {
                if view.covers(at) {
                    parts.extend(tokens_first(&leaves[at], positions)?);
                }
            }
            at += 1;
            let joined = if parts.len() == views.len() {
                order.joined(&parts, last.shared)?
            } else {
                None
            };
            all &= joined.is_some();
            let joined = match joined {
                Some(joined) => joined,
                None if parts.len() == views.len() => parts[0].clone(),
                None if last.shared => copied(tensor)?,
                None => tensor.clone(),
            };
            tensors.push(joined.clone());
            Ok(joined)
        })?;
        let (rows, values): (Vec<_>, Vec<_>) = order.tokens.into_iter().unzip();
        let positions = TokenPositions {
            values: values.into(),
            rows: first.rows.is_some().then(|| rows.into()),
            numbers: None,
            dims: TokenDims::Rows(0),
            sequences: first.sequences,
        };
        Ok(Some(Self {
            value,
            positions,
            tensors,
            copied: all,
        }))
    }

    /// Returns its tensors as they are stored; None if later readers must not have one.
    pub fn kept(&self, checks: bool) -> PyResult<Option<Vec<KeptTensor>>> {
        let tensors = self.tensors.iter();
        tensors
            .map(|tensor| KeptTensor::copied(tensor, checks))
            .collect()
    }
}

impl JoinOrder {
    /// Joins the tensors of the calls; None if that is the only one as it is.
    fn joined<'py>(
        &self,
        parts: &[Bound<'py, PyAny>],
        shared: bool,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = parts[0].py();
        let mut total = 0;
        for part in parts {
            total += length(part, 0)?.unwrap_or_default();
        }
        let in_order = self.rows.len() == total && self.rows.is_sorted();
        if in_order && parts.len() == 1 {
            return if shared {
                owned(&parts[0]).map(Some)
            } else {
                Ok(None)
            };
        }
        outside_inference(py, || {
            let mut together = parts[0].clone();
            if parts.len() > 1 {
                let torch = py.import(intern!(py, "torch"))?;
                let parts = PyList::new(py, parts)?;
                together = torch
                    .call_method1(intern!(py, "cat"), (parts,))
                    .map_err(|cause| {
                        let message = "the tensors of the calls have different shapes, as patterns \
                                       over a growing cache, and are not joined: pass calls=\"all\"";
                        caused(py, hook_error(py, message), cause)
                    })?;
            }
            if in_order {
                return Ok(together);
            }
            match Rows::of(self.rows.clone()) {
                rows @ Rows::Index(_) => rows.narrow(&together, 0),
                rows @ Rows::Range { .. } => owned(&rows.narrow(&together, 0)?),
            }
        })
        .map(Some)
    }
}

/// Returns a tensor of (tokens, ...), which may share memory with others; None if it has not one for
/// each position.
fn tokens_first<'py>(
    tensor: &Bound<'py, PyAny>,
    positions: &TokenPositions,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = tensor.py();
    let (tokens, first) = (positions.values.len(), length(tensor, 0)?);
    match positions.dims {
        TokenDims::Padded(rows) => {
            let columns = length(tensor, 1)?.unwrap_or_default();
            // torch flattens no sparse tensor.
            let sparse = tensor.getattr(intern!(py, "is_sparse"))?.is_truthy()?;
            let fits = !sparse && first == Some(rows) && rows * columns == tokens;
            let flatten = || tensor.call_method1(intern!(py, "flatten"), (0, 1));
            fits.then(flatten).transpose()
        }
        TokenDims::Rows(dim) if length(tensor, dim)? != Some(tokens) => Ok(None),
        TokenDims::Rows(0) => Ok(Some(tensor.clone())),
        TokenDims::Rows(1) if first == Some(1) => tensor.get_item(0).map(Some),
        TokenDims::Rows(dim) => tensor
            .call_method1(intern!(py, "movedim"), (dim, 0))
            .map(Some),
    }
}

impl Values {
    /// Stores a joined value in place of its parts, if they are still stored. Returns the tensors to
    /// drop without a lock: the former parts', or the new ones if a part is gone.
    pub fn join(
        &mut self,
        views: &[View<'_>],
        joined: &Joined<'_>,
        tensors: Vec<KeptTensor>,
    ) -> Result<Vec<Kept>, Vec<KeptTensor>> {
        let Some(first) = self.calls.iter().position(|kept| kept.is_of(&views[0])) else {
            return Err(tensors);
        };
        let stored = self.calls.iter().skip(first).zip(views);
        if stored.filter(|(kept, view)| kept.is_of(view)).count() < views.len() {
            return Err(tensors);
        }
        let former: Vec<_> = self.calls.drain(first..first + views.len()).collect();
        let own = Kept {
            serial: 0, // for gradients, which are found by the call
            value: joined.value.clone().unbind(),
            tensors,
            bytes: former.iter().map(|kept| kept.bytes).sum(),
            shared: false,
            rows: None,
            positions: Some(joined.positions.clone()),
        };
        self.calls.insert(first, own);
        Ok(former)
    }
}
