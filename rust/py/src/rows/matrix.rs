//! Matrices whose rows are the tokens of a padded batch, one row of it after the other, as routers and
//! experts take and return them.
//!
//! The number of rows does not decide it: one expert may get as many tokens, in another order. The
//! call itself decides it: the module took tensors of (batch, length, ...), or a matrix that is a
//! view of one.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::hooks::native::Turn;
use crate::torch::tensors::any_tensor;

/// Arguments of a call.
#[derive(Clone, Copy)]
pub struct CallArguments<'a, 'py> {
    pub args: &'a Bound<'py, PyTuple>,
    pub kwargs: Option<&'a Bound<'py, PyDict>>,
}

/// Number of rows of a padded batch, and of its columns.
#[derive(Clone, Copy)]
pub struct Padded {
    pub rows: usize,
    pub columns: usize,
}

impl<'a, 'py> CallArguments<'a, 'py> {
    pub const fn of(turn: &Turn<'a, 'py>) -> Self {
        Self {
            args: turn.args,
            kwargs: turn.kwargs,
        }
    }

    /// True if they show that the rows of matrices of the call are these tokens.
    pub fn have(&self, tokens: Padded) -> PyResult<bool> {
        let mut test = |tensor: &Bound<'py, PyAny>| {
            Ok(tokens.are_first(tensor)? || tokens.are_viewed(tensor)?)
        };
        Ok(any_tensor(self.args.as_any(), &mut test)?
            || (self.kwargs).map_or(Ok(false), |it| any_tensor(it.as_any(), &mut test))?)
    }
}

impl Padded {
    /// True for a tensor of (rows, columns, ...).
    pub fn are_first(self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(shape(tensor)?.starts_with(&[self.rows, self.columns]))
    }

    /// True for a matrix with a row for each token.
    pub fn may_be_rows_of(self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let shape = shape(tensor)?;
        Ok(matches!(*shape, [rows, _] if rows == self.rows * self.columns))
    }

    /// True for a matrix that is a view of a tensor of (rows, columns, ...), in order.
    fn are_viewed(self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        if !self.may_be_rows_of(tensor)? {
            return Ok(false);
        }
        let base = tensor.getattr(intern!(py, "_base"))?;
        if base.is_none() || !self.are_first(&base)? {
            return Ok(false);
        }
        let same = |name| {
            let of = |it: &Bound<'_, PyAny>| it.call_method0(name)?.extract::<usize>();
            PyResult::Ok(of(tensor)? == of(&base)?)
        };
        let in_order = |it: &Bound<'_, PyAny>| {
            let contiguous = it.call_method0(intern!(py, "is_contiguous"))?;
            contiguous.is_truthy()
        };
        Ok(same("numel")? && same("data_ptr")? && in_order(tensor)? && in_order(&base)?)
    }
}

fn shape(tensor: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    tensor.getattr(intern!(tensor.py(), "shape"))?.extract()
}
