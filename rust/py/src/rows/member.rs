//! Members of a batch, and whose each of its rows is.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::call::stop::Stop;
use crate::contexts::frame::Frame;
use crate::error::{hook_type_error, rows_error, type_name};
use crate::hooks::site::{is_fault, log_error};
use crate::rows::numbers::BatchRows;
use crate::rows::places::{BatchRow, MemberPlace};

/// Request, scope or capture in a batch.
pub struct Member {
    pub frame: Py<Frame>,
    pub rows: BatchRows,
    /// True once one of its hooks ran.
    pub ran: AtomicBool,
    /// True if its failure is logged; an engine logs the failures of its requests itself.
    logs: bool,
}

impl Member {
    /// Raises `HookTypeError` unless `frame` is one.
    pub fn of(frame: &Bound<'_, PyAny>, rows: BatchRows, logs: bool) -> PyResult<Self> {
        let py = frame.py();
        let frame = frame.cast::<Frame>().map_err(|_| {
            let got = type_name(frame);
            let message = format!(
                "a member of a batch must be a request, a scope or a capture, \
                                   got {got}"
            );
            hook_type_error(py, message)
        })?;
        Ok(Self {
            frame: frame.clone().unbind(),
            rows,
            ran: AtomicBool::new(false),
            logs,
        })
    }

    /// Fails it, for this reason; logs that unless its engine does.
    pub fn fail(&self, py: Python<'_>, error: &PyErr) {
        if !self.frame.get().end(py, error) || !self.logs {
            return;
        }
        let frame = self.frame.bind(py).repr();
        let frame = frame.map_or_else(|_| "a request".to_owned(), |repr| repr.to_string());
        let message = format!("{frame} failed in a batch: its rows continue without hooks");
        if let Err(unlogged) = log_error(py, &message, error) {
            unlogged.write_unraisable(py, None);
        }
    }

    /// Fails it for an exception of its hooks; raises it if it is no fault, as `KeyboardInterrupt`.
    pub fn fail_with(&self, py: Python<'_>, error: PyErr) -> PyResult<()> {
        // The forward is shared: a capture that stops does not end it.
        if error.is_instance_of::<Stop>(py) {
            return Ok(());
        }
        if !is_fault(py, &error) {
            return Err(error);
        }
        self.fail(py, &error);
        Ok(())
    }

    /// Fails it if its deadline has passed, and returns true then. `now` is read when first needed.
    pub fn expire(&self, py: Python<'_>, now: &mut Option<Instant>) -> bool {
        let frame = self.frame.get();
        let passed = !frame.failed()
            && frame
                .deadline()
                .is_some_and(|deadline| *now.get_or_insert_with(Instant::now) > deadline);
        if passed {
            let error = PyTimeoutError::new_err("the deadline of the request has passed");
            self.fail(py, &error);
        }
        passed
    }
}

/// Member of each row, by number, and the row's place in it; None for an unowned row.
pub struct RowOwners(Vec<Option<(usize, MemberPlace)>>);

impl RowOwners {
    pub fn of(py: Python<'_>, members: &[Member], named: usize) -> PyResult<Self> {
        let mut owners = vec![None; named];
        for (number, member) in members.iter().enumerate() {
            for (place, BatchRow(row)) in member.rows.iter().enumerate() {
                if let Some((other, _)) = owners[row].replace((number, MemberPlace(place))) {
                    let message = if other == number {
                        format!("row {row} is named twice for member {number} of the batch")
                    } else {
                        format!("rows overlap: row {row} belongs to members {other} and {number}")
                    };
                    return Err(rows_error(py, message));
                }
            }
        }
        Ok(Self(owners))
    }

    pub fn of_row(&self, row: BatchRow) -> Option<(usize, MemberPlace)> {
        self.0.get(row.0).copied().flatten()
    }
}
