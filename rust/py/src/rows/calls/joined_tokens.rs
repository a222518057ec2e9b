//! Tokens of many members of a batch at the positions of their plans.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::rows::call_tokens::CallTokens;
use crate::rows::calls::merging::SharedValue;
use crate::rows::membership::Membership;
use crate::rows::numbers::{Index, Selection};
use crate::rows::places::TokenDims;
use crate::rows::tracker::TokenTracker;
use crate::torch::copies::Copies;
use crate::torch::tensors::host_tensor;

/// True if the batch of a member, its request, knows the positions of its tokens.
pub fn positioned(owner: &Bound<'_, PyAny>) -> PyResult<bool> {
    let tracker = TokenTracker::of(owner.py(), None, Some(owner))?;
    Ok(Membership::positioned(tracker.as_super().get()))
}

/// Part of a shared value whose tokens are wanted.
pub struct TokenPart {
    /// Number of the part.
    pub number: usize,
    /// Number of its rows.
    pub rows: usize,
    /// Index of the positions in its plan; None for all tokens, whose positions are not needed.
    pub at: Option<usize>,
}

/// Tokens at positions of some parts. All tokens of the parts are counted one part after the other.
pub struct JoinedTokens<'py> {
    /// The parts with tokens: index in `asked`, member, and tokens.
    pub parts: Vec<(usize, Bound<'py, PyAny>, CallTokens)>,
    /// Place of each token among all.
    index: Index,
    /// Number of all tokens.
    pub count: usize,
    /// Number of columns of padded rows; None if a row is a token.
    columns: Option<usize>,
    dim: usize,
}

impl<'py> JoinedTokens<'py> {
    /// Finds the tokens; `failed` takes the errors of parts. Raises unless the batch knows positions.
    pub fn of(
        shared: &SharedValue<'_, 'py>,
        asked: &[TokenPart],
        failed: &mut Vec<(usize, PyErr)>,
    ) -> PyResult<Self> {
        let py = shared.value.py();
        let mut parts = Vec::with_capacity(asked.len());
        let mut places = Vec::with_capacity(asked.len());
        let (mut all, mut columns) = (0, None);
        for (place, part) in asked.iter().enumerate() {
            let tokens = (shared.tokens)(part.number);
            // Without positions a row is a token.
            columns = match &tokens.positions {
                Some(positions) => match positions.dims {
                    TokenDims::Rows(_) => None,
                    TokenDims::Padded(rows) => Some(positions.values.len() / rows.max(1)),
                },
                None if part.at.is_none() => None,
                None => {
                    let message = "hooks on gates merge where the batch knows its positions";
                    return Err(PyTypeError::new_err(message));
                }
            };
            let count = part.rows * columns.unwrap_or(1);
            let owner = (shared.owner)(part.number);
            if let Some(at) = part.at {
                let tracker = TokenTracker::of(py, None, Some(&owner))?;
                let describe = || (shared.describe)(part.number);
                match TokenTracker::tokens_at(tracker, at, Some(&tokens), &describe) {
                    Err(error) => failed.push((part.number, error)),
                    Ok(None) => {}
                    Ok(Some(found)) => {
                        let of_part = found.places.iter().flatten();
                        places.extend(of_part.map(|it| all + it.0));
                        parts.push((place, owner, found.tokens));
                    }
                }
            } else {
                places.extend(all..all + count);
                parts.push((place, owner, CallTokens::unknown(count)));
            }
            all += count;
        }
        Ok(Self {
            parts,
            index: Index::of(places),
            count: all,
            columns,
            dim: shared.layout.dim,
        })
    }

    /// Returns errors with the numbers of the parts. `errors`: of each, None for a part without one;
    /// `asked`: the parts that were asked for.
    pub fn failures(
        &self,
        asked: &[TokenPart],
        errors: impl IntoIterator<Item = Option<PyErr>>,
    ) -> impl Iterator<Item = (usize, PyErr)> {
        let pairs = self.parts.iter().zip(errors);
        pairs.filter_map(|((place, ..), error)| Some((asked[*place].number, error?)))
    }

    /// True if one of the `asked` parts has no token for which `acts` is true.
    pub fn has_idle(&self, asked: &[TokenPart], acts: &[bool]) -> bool {
        let mut start = 0;
        let mut idle = self.parts.iter().map(|(.., tokens)| {
            let own = &acts[start..start + tokens.len()];
            start += tokens.len();
            !own.contains(&true)
        });
        self.parts.len() < asked.len() || idle.any(|idle| idle)
    }

    /// Number of the tokens.
    pub fn len(&self) -> usize {
        self.index.rows.len()
    }

    fn has_all(&self) -> bool {
        self.index.rows.len() == self.count
    }

    /// Returns how many leading dimensions of a tensor of the parts' rows index tokens. Raises if they
    /// are not found there.
    fn dims_of(&self, x: &Bound<'py, PyAny>) -> PyResult<usize> {
        let py = x.py();
        let shape: Vec<usize> = x.getattr(intern!(py, "shape"))?.extract()?;
        let found = match self.columns {
            Some(columns) => shape.get(1) == Some(&columns),
            None => shape[..self.dim].iter().all(|length| *length == 1),
        };
        let dims = self.dim + 1 + usize::from(self.columns.is_some());
        if !found || shape.len() < dims || shape[..dims].iter().product::<usize>() != self.count {
            let message = "the tokens are not found in the dimensions of this tensor";
            return Err(PyTypeError::new_err(message));
        }
        Ok(dims)
    }

    /// Takes the tokens of a tensor; `selection` has the parts' rows in it. One dimension of tokens
    /// replaces the dimensions that index them.
    pub fn take(
        &self,
        x: &Bound<'py, PyAny>,
        selection: &Selection,
        size: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let mut rows = x.clone();
        if !selection.rows.all(size) {
            rows = selection.rows.narrow(x, self.dim)?;
        }
        let dims = self.dims_of(&rows)?;
        let flat = match dims {
            1 => rows,
            _ => rows.call_method1(intern!(py, "flatten"), (0, dims - 1))?,
        };
        if self.has_all() {
            return Ok(flat);
        }
        let places = self.index.on_device_of(&flat)?;
        flat.call_method1(intern!(py, "index_select"), (0, places))
    }

    /// Returns a tensor of bools that broadcasts to a tensor of the parts' rows: the tokens take the
    /// values of `acts`, all others are false.
    pub fn mask(&self, acts: &[bool], x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let mut all = vec![false; self.count];
        for (place, act) in self.index.rows.iter().zip(acts) {
            all[*place] = *act;
        }
        // A plain copy to a GPU would wait for it.
        let mask = Copies::default().on_device_of(x, || host_tensor(py, all, "bool"))?;
        self.shaped(&mask, x)
    }

    /// Returns numbers for all tokens likewise, 0 for others; `numbers`: of the tokens.
    pub fn spread(
        &self,
        numbers: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let mut all = numbers.clone();
        if !self.has_all() {
            let places = self.index.on_device_of(&all)?;
            let zeros = all.call_method1(intern!(py, "new_zeros"), (self.count,))?;
            all = zeros.call_method1(intern!(py, "index_copy"), (0, places, all))?;
        }
        let dtype = x.getattr(intern!(py, "dtype"))?;
        all = all.call_method1(intern!(py, "to"), (dtype,))?;
        let device = x.getattr(intern!(py, "device"))?;
        if !all.getattr(intern!(py, "device"))?.eq(&device)? {
            all = Copies::default().on_device_of(x, || Ok(all))?;
        }
        self.shaped(&all, x)
    }

    fn shaped(
        &self,
        all: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let dims = self.dims_of(x)?;
        let mut shape: Vec<usize> = x.getattr(intern!(py, "shape"))?.extract()?;
        shape[dims..].fill(1);
        all.call_method1(intern!(py, "reshape"), (shape,))
    }
}
