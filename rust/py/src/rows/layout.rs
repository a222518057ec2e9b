//! Row layout of a module's tensors: the rows of the batch, or the module's own.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::rows_error;
use crate::rows::member::{Member, RowOwners};
use crate::rows::numbers::{Rows, length};
use crate::rows::places::{BatchRow, MemberPlace, OwnRows, TokenPlace, in_tensors};
use crate::torch::is_tensor;

/// Rows that the tensors of one module have.
pub struct Layout {
    pub dim: usize,
    pub size: usize,
    /// Rows of each member, if the module has its own row layout; None: the rows of the batch.
    gathered: Option<Box<[(Rows, OwnRows)]>>,
}

/// Index of the rows of a module, and their dimension.
pub struct Gathered {
    pub module: Py<PyAny>,
    /// Index tensor, or the function that makes it.
    pub index: Py<PyAny>,
    pub dim: usize,
}

impl Gathered {
    /// Returns the row of the batch, or a negative number, for each of the rows.
    pub fn read<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<i64>> {
        let py = module.py();
        let mut index = self.index.bind(py).clone();
        if !is_tensor(&index)? {
            let kwargs = kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
            index = index.call1((module, args, kwargs, output))?;
        }
        let dims: usize = index.call_method0(intern!(py, "dim"))?.extract()?;
        if dims != 1 {
            let message = format!("an index in gathered must have one dimension, got {dims}");
            return Err(rows_error(py, message));
        }
        let rows = index.call_method0(intern!(py, "tolist"))?;
        rows.extract().map_err(|_| {
            let dtype = index.getattr("dtype");
            let got = dtype.map_or_else(|_| "?".to_owned(), |it| it.to_string());
            let message = format!("an index in gathered must be a tensor of ints, got {got}");
            rows_error(py, message)
        })
    }

    /// Finds the rows of a module's tensors. `index`: see `read`; `size`: number of rows of the batch.
    pub fn layout(
        &self,
        py: Python<'_>,
        index: &[i64],
        members: &[Member],
        owners: &RowOwners,
        size: Option<usize>,
    ) -> PyResult<Layout> {
        let mut rows = vec![(Vec::new(), Vec::new()); members.len()];
        for (at, row) in index.iter().enumerate() {
            let Ok(row) = usize::try_from(*row) else {
                continue; // nobody's
            };
            if let Some(size) = size.filter(|size| row >= *size) {
                let message =
                    format!("row {row} in gathered is out of range: the batch has {size} rows");
                return Err(rows_error(py, message));
            }
            if let Some((member, place)) = owners.of_row(BatchRow(row)) {
                rows[member].0.push(at);
                rows[member].1.push(place);
            }
        }
        let dim = self.dim;
        let own = rows.into_iter().map(|(rows, places)| {
            let places = places.into();
            (Rows::of(rows), OwnRows::Gathered { places, dim })
        });
        Ok(Layout {
            dim,
            size: index.len(),
            gathered: Some(own.collect()),
        })
    }
}

impl Layout {
    /// Layout of a module with the rows of the batch.
    pub const fn of_batch(dim: usize, size: usize) -> Self {
        Self {
            dim,
            size,
            gathered: None,
        }
    }

    /// Layout of a module with matrices of the tokens of a batch: a row for each token, the tokens of
    /// one batch row after the other.
    pub fn of_matrices(members: &[Member], rows: usize, columns: usize) -> Self {
        let own = members.iter().map(|member| {
            let of_row = |BatchRow(row): BatchRow| row * columns..(row + 1) * columns;
            let rows = member.rows.iter().flat_map(of_row);
            (Rows::of(rows.collect()), OwnRows::Matrix)
        });
        Self {
            dim: 0,
            size: rows * columns,
            gathered: Some(own.collect()),
        }
    }

    /// True for the rows of the batch.
    pub const fn is_of_batch(&self) -> bool {
        self.gathered.is_none()
    }

    /// True if the rows are tokens of matrices.
    pub fn has_matrices(&self) -> bool {
        let own = self.gathered.as_ref().and_then(|own| own.first());
        own.is_some_and(|(_, own)| matches!(own, OwnRows::Matrix))
    }

    /// Rows of a member.
    pub fn rows<'a>(&'a self, members: &'a [Member], member: usize) -> &'a Rows {
        match &self.gathered {
            Some(own) => &own[member].0,
            None => members[member].rows.in_tensors(),
        }
    }

    /// Rows of a member as places among its rows of the batch; None if they are the same.
    pub fn own_rows(&self, member: usize) -> Option<&OwnRows> {
        Some(&self.gathered.as_ref()?[member].1)
    }

    /// Converts places among a member's rows of the batch to places among its rows here.
    pub fn places(&self, member: usize, of_batch: &[MemberPlace]) -> Vec<TokenPlace> {
        match self.own_rows(member) {
            Some(own) => own.among(of_batch),
            None => in_tensors(of_batch),
        }
    }

    /// True if the tensor has the rows.
    pub fn covers(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(length(tensor, self.dim)? == Some(self.size))
    }
}
