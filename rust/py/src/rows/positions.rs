//! Positions of the rows of a batch, and of the tokens of each member.

use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;

use crate::error::rows_error;
use crate::rows::at::{Masks, PlanPositions};
use crate::rows::member::Member;
use crate::rows::membership::Membership;
use crate::rows::places::{BatchRow, Position};

/// Positions of the rows of a batch.
pub struct Positions {
    /// Positions of the first row, then of the next.
    pub values: Vec<Position>,
    /// Number of columns of a padded batch; None if each row is one token.
    pub columns: Option<usize>,
    /// Positions of each member, made when first needed.
    members: Box<[OnceLock<Arc<[Position]>>]>,
    /// Lengths of each member's prompts, if they were given with the positions.
    prompts: Box<[Option<Arc<[i64]>>]>,
}

impl Positions {
    /// `prompts`: for each member of the batch.
    pub fn new(
        values: Vec<Position>,
        columns: Option<usize>,
        prompts: Box<[Option<Arc<[i64]>>]>,
    ) -> Self {
        Self {
            values,
            columns,
            members: prompts.iter().map(|_| OnceLock::new()).collect(),
            prompts,
        }
    }

    /// Gives a member the lengths of its prompts, and finds its tokens at the positions of its plan. A
    /// function of `at` that raises fails only its member.
    pub fn place(
        &self,
        py: Python<'_>,
        number: usize,
        member: &Member,
        dim: usize,
    ) -> PyResult<()> {
        let frame = member.frame.get();
        if let Some(lengths) = &self.prompts[number] {
            Membership::set_prompts(frame, Arc::clone(lengths));
        }
        let Some(ats) = PlanPositions::of(frame).filter(|_| !frame.failed()) else {
            return Ok(());
        };
        let prompts = Membership::prompts(frame);
        let rows = self.columns.map_or(1, |_| member.rows.len());
        if !(prompts.len() <= 1 || prompts.len() == rows) {
            let message = if self.columns.is_some() {
                let found = prompts.len();
                format!("lengths has {found} prompts for a request with {rows} rows")
            } else {
                "a request whose rows are single tokens has one prompt: lengths must have one int \
                 for it"
                    .to_owned()
            };
            return Err(rows_error(py, message));
        }
        ats.check(py, prompts.first().copied())?;
        let own = self.of(number, member);
        match Masks::of_member(py, ats, own, self.columns, prompts, dim) {
            Ok(masks) => Membership::set_masks(frame, Some(masks)),
            Err(error) => member.fail_with(py, error)?,
        }
        Ok(())
    }

    /// Returns the positions of a member's tokens: of its first row, then of the next.
    pub fn of(&self, number: usize, member: &Member) -> Arc<[Position]> {
        let width = self.columns.unwrap_or(1);
        let of_row = |BatchRow(row): BatchRow| &self.values[row * width..(row + 1) * width];
        let found = || member.rows.iter().flat_map(of_row).copied().collect();
        Arc::clone(self.members[number].get_or_init(found))
    }
}
