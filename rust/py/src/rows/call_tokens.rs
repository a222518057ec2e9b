//! `CallTokens`: tokens of a call at some positions, as Python's hooks get them.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::rows::places::{Position, TokenPositions};

/// Tokens of a call, in the order of memory.
#[pyclass(frozen, eq, skip_from_py_object, module = "ferrohook._core")]
#[derive(Clone, PartialEq)]
pub struct CallTokens {
    positions: Arc<[Position]>,
    /// Row of each in the request; None if all have row 0.
    rows: Option<Arc<[usize]>>,
    /// Id of their sequences: calls with the same one run tokens of the same sequences.
    pub sequences: u64,
    /// Length of the prompt of each row, or one for all; None if they are not known.
    prompts: Option<Arc<[i64]>>,
}

#[pymethods]
impl CallTokens {
    fn __len__(&self) -> usize {
        self.positions.len()
    }

    /// Position of each.
    #[getter(positions)]
    fn positions_for_python(&self) -> Vec<i64> {
        self.positions.iter().map(|it| it.0).collect()
    }

    /// Row of each in the request.
    #[getter(rows)]
    fn rows_for_python(&self) -> Vec<usize> {
        let rows = self.rows.as_deref();
        rows.map_or_else(|| vec![0; self.positions.len()], <[_]>::to_vec)
    }

    /// Length of the prompt of each; 0 where it is not known.
    #[getter(prompts)]
    fn prompts_for_python(&self) -> Vec<i64> {
        let rows = self.rows_for_python().into_iter();
        rows.map(|row| self.prompt_of(row).unwrap_or(0)).collect()
    }

    /// Id of their sequences: calls with the same one run tokens of the same sequences.
    #[getter(sequences)]
    fn sequences_for_python(&self) -> u64 {
        self.sequences
    }
}

/// Returns the position of the last token of a prompt; 0 where its length is not known.
pub fn last_of_prompt(length: Option<i64>) -> i64 {
    length.unwrap_or(1).max(1) - 1
}

/// Tokens of one row that stand side by side.
pub struct RowTokens<'a> {
    pub row: usize,
    pub positions: &'a [Position],
    /// Length of the row's prompt; None if it is not known.
    pub prompt: Option<i64>,
}

impl CallTokens {
    pub fn of(positions: &TokenPositions, prompts: Option<Arc<[i64]>>) -> Self {
        Self {
            positions: Arc::clone(&positions.values),
            rows: positions.rows.clone(),
            sequences: positions.sequences,
            prompts,
        }
    }

    /// Tokens whose positions are not needed.
    pub fn unknown(count: usize) -> Self {
        Self {
            positions: vec![Position::NOBODY; count].into(),
            rows: None,
            sequences: 0,
            prompts: None,
        }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Yields the tokens of each row.
    pub fn by_row(&self) -> impl Iterator<Item = RowTokens<'_>> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let left = self.positions.get(start..).filter(|it| !it.is_empty())?;
            let (row, count) = match &self.rows {
                None => (0, left.len()),
                Some(rows) => {
                    let row = rows[start];
                    let others = rows[start..].iter().position(|it| *it != row);
                    (row, others.unwrap_or(left.len()))
                }
            };
            start += count;
            Some(RowTokens {
                row,
                positions: &left[..count],
                prompt: self.prompt_of(row),
            })
        })
    }

    fn prompt_of(&self, row: usize) -> Option<i64> {
        match self.prompts.as_deref()? {
            [one] => Some(*one),
            all => all.get(row).copied(),
        }
    }

    /// Returns those from the last token of each prompt on; all where that is not known.
    pub fn since_last_prompt(&self) -> Self {
        let last = |row| last_of_prompt(self.prompt_of(row));
        let row_of = |place: usize| self.rows.as_ref().map_or(0, |rows| rows[place]);
        let kept = |place: &usize| self.positions[*place].0 >= last(row_of(*place));
        let kept: Vec<_> = (0..self.len()).filter(kept).collect();
        if kept.len() == self.len() {
            return self.clone();
        }
        let rows = self.rows.as_ref();
        Self {
            positions: kept.iter().map(|place| self.positions[*place]).collect(),
            rows: rows.map(|rows| kept.iter().map(|place| rows[*place]).collect()),
            sequences: self.sequences,
            prompts: self.prompts.clone(),
        }
    }
}
