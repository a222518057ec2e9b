//! Rows, positions and lengths of prompts as they are given to a batch.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PySlice, PyString, PyTuple};

use crate::error::{hook_type_error, rows_error, type_name};
use crate::rows::numbers::{BatchRows, Rows};
use crate::rows::places::Position;
use crate::torch::is_tensor;

/// Limit for the number of rows.
pub const MOST_ROWS: usize = 1 << 24;

/// Error for a row past the limit.
pub fn too_many(py: Python<'_>, row: usize) -> PyErr {
    let message = format!("row {row} is out of range: a batch has at most {MOST_ROWS} rows");
    rows_error(py, message)
}

/// Reads rows as they are given to `fh.batch`; `size`: number of rows of the batch, if known.
pub fn read(rows: &Bound<'_, PyAny>, size: Option<usize>) -> PyResult<BatchRows> {
    let py = rows.py();
    let unknown = || {
        let message = "negative rows and slices without an end count from the number of rows: \
                       pass positions or size";
        rows_error(py, message)
    };
    if let Ok(slice) = rows.cast::<PySlice>() {
        let bound = |name: &Bound<'_, PyString>| slice.getattr(name)?.extract::<Option<i64>>();
        let (first, behind) = (bound(intern!(py, "start"))?, bound(intern!(py, "stop"))?);
        let step = bound(intern!(py, "step"))?.unwrap_or(1);
        if step < 1 {
            let message = format!("the step of a slice of rows must be at least 1, got {step}");
            return Err(PyValueError::new_err(message));
        }
        let place = |bound: i64| {
            if let Ok(bound) = usize::try_from(bound) {
                return Ok(bound);
            }
            let from_end = usize::try_from(bound.unsigned_abs()).unwrap_or(usize::MAX);
            Ok(size.ok_or_else(unknown)?.saturating_sub(from_end))
        };
        let start = first.map_or(Ok(0), place)?;
        let end = behind.map_or_else(|| size.ok_or_else(unknown), place)?;
        if step == 1 {
            let length = end.saturating_sub(start);
            return Ok(BatchRows(Rows::Range { start, length }));
        }
        let every = usize::try_from(step).unwrap_or(usize::MAX);
        if end > MOST_ROWS {
            return Err(too_many(py, end - 1));
        }
        let rows = (start..end).step_by(every).collect();
        return Ok(BatchRows(Rows::of(rows)));
    }
    let one = rows.is_instance_of::<PyInt>();
    let wrong = |_| {
        let message = format!(
            "rows must be an int, a slice, a sequence of ints or an index tensor, got {}",
            type_name(rows)
        );
        hook_type_error(py, message)
    };
    let numbers: Vec<i64> = if one {
        vec![rows.extract().map_err(wrong)?]
    } else if is_tensor(rows)? {
        let dims: usize = rows.call_method0(intern!(py, "dim"))?.extract()?;
        let boolean = rows
            .getattr("dtype")?
            .is(&py.import("torch")?.getattr("bool")?);
        let floating = rows.call_method0("is_floating_point")?.is_truthy()?;
        if dims != 1 || boolean || floating {
            return Err(hook_type_error(
                py,
                "an index tensor of rows must have ints and one dimension",
            ));
        }
        rows.call_method0(intern!(py, "tolist"))?.extract()?
    } else {
        rows.extract().map_err(wrong)?
    };
    let place = |row: i64| {
        if let Ok(row) = usize::try_from(row) {
            return Ok(row);
        }
        let from_end = usize::try_from(row.unsigned_abs()).unwrap_or(usize::MAX);
        let size = size.ok_or_else(unknown)?;
        size.checked_sub(from_end).ok_or_else(|| {
            rows_error(
                py,
                format!("row {row} is out of range: the batch has {size} rows"),
            )
        })
    };
    numbers
        .into_iter()
        .map(place)
        .collect::<PyResult<_>>()
        .map(|rows| BatchRows(Rows::of(rows)))
}

/// Rows of members that are single tokens, with positions that increase by one.
#[derive(Default)]
pub struct Spans {
    /// First row of each, number of rows and position of the first.
    spans: Vec<(usize, usize, i64)>,
    /// Length of each prompt.
    prompts: Vec<i64>,
}

impl Spans {
    /// Reads the next one: at the indices 1 to 4 the first row, the number of rows, the first position
    /// and the length of the prompt.
    pub fn read(&mut self, span: &Bound<'_, PyTuple>) -> PyResult<BatchRows> {
        let start = span.get_borrowed_item(1)?.extract()?;
        let length = span.get_borrowed_item(2)?.extract()?;
        let position = span.get_borrowed_item(3)?.extract()?;
        self.spans.push((start, length, position));
        self.prompts.push(span.get_borrowed_item(4)?.extract()?);
        Ok(BatchRows(Rows::Range { start, length }))
    }

    /// Length of each member's prompt.
    pub fn prompts(&self) -> Box<[Option<Arc<[i64]>>]> {
        let prompts = self.prompts.iter();
        prompts.map(|length| Some(Arc::from([*length]))).collect()
    }

    /// Position of each of the rows of a batch, all of which are in range.
    pub fn positions(&self, rows: usize) -> Vec<Position> {
        let mut values = vec![Position::NOBODY; rows];
        for (start, length, position) in &self.spans {
            for (row, position) in values[*start..start + length].iter_mut().zip(*position..) {
                *row = Position(position);
            }
        }
        values
    }
}

/// Reads the length of a prompt, or of each of several.
pub fn lengths(lengths: &Bound<'_, PyAny>) -> PyResult<Arc<[i64]>> {
    let py = lengths.py();
    let given = if is_tensor(lengths)? {
        lengths.call_method0(intern!(py, "tolist"))?
    } else {
        lengths.clone()
    };
    let each: PyResult<Vec<i64>> = if given.is_instance_of::<PyInt>() {
        given.extract().map(|only| vec![only])
    } else {
        given.extract()
    };
    if let Ok(each) = &each
        && let Some(negative) = each.iter().find(|it| **it < 0)
    {
        return Err(rows_error(
            py,
            format!("lengths must be 0 or more, got {negative}"),
        ));
    }
    each.map(Arc::from).map_err(|_| {
        let got = type_name(lengths);
        let message =
            format!("lengths must be one or several 64-bit ints for each request, got {got}");
        hook_type_error(py, message)
    })
}
