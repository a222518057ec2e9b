//! Rows of a member as they are given to `fh.batch`.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PySlice, PyString};

use crate::error::{hook_type_error, rows_error, type_name};
use crate::rows::numbers::{BatchRows, Rows};
use crate::torch::is_tensor;

/// Limit for the number of rows.
pub const MOST_ROWS: usize = 1 << 24;

/// Error for a row behind the limit.
pub fn too_many(py: Python<'_>, row: usize) -> PyErr {
    let message = format!("row {row} is out of range: a batch has at most {MOST_ROWS} rows");
    rows_error(py, message)
}

/// Reads rows as they are given to `fh.batch`; `size`: number of rows of the batch, if known.
pub fn read(rows: &Bound<'_, PyAny>, size: Option<usize>) -> PyResult<BatchRows> {
    let py = rows.py();
    let unknown = || {
        let message = "negative rows and slices without an end count from the number of rows: \
                       give positions or size";
        rows_error(py, message.to_owned())
    };
    if let Ok(slice) = rows.cast::<PySlice>() {
        let bound = |name: &Bound<'_, PyString>| slice.getattr(name)?.extract::<Option<i64>>();
        let (first, behind) = (bound(intern!(py, "start"))?, bound(intern!(py, "stop"))?);
        let step = bound(intern!(py, "step"))?.unwrap_or(1);
        if step < 1 {
            let message = format!("the step of a slice of rows is at least 1, got {step}");
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
            "rows are an int, a slice, a sequence of ints or an index tensor, got {}",
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
            let message = "rows are an index tensor of ints with one dimension".to_owned();
            return Err(hook_type_error(py, message));
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
                format!("row {row} is out of range: the batch has {size}"),
            )
        })
    };
    numbers
        .into_iter()
        .map(place)
        .collect::<PyResult<_>>()
        .map(|rows| BatchRows(Rows::of(rows)))
}
