//! Rows of one dimension of tensors.

use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PySlice, PyTuple};

use crate::rows::places::{BatchRow, TokenPlace};
use crate::torch::copies::Copies;
use crate::torch::facts::Facts;
use crate::torch::nested::is_nested;
use crate::torch::tensors::{host_tensor, requires_grad};

/// Rows of a dimension.
#[derive(Clone, PartialEq, Eq)]
pub enum Rows {
    /// `length` rows from `start`.
    Range {
        start: usize,
        length: usize,
    },
    Index(Index),
}

/// Rows in any order.
#[derive(Clone)]
pub struct Index {
    pub rows: Arc<[usize]>,
    /// Copies of the tensor of the rows.
    copies: Arc<Copies>,
}

impl PartialEq for Index {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl Eq for Index {}

impl Index {
    pub fn of(rows: Vec<usize>) -> Self {
        Self {
            rows: rows.into(),
            copies: Arc::default(),
        }
    }

    /// Returns the rows as a tensor on the device of another.
    pub fn on_device_of<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        self.copies
            .on_device_of(tensor, || host_tensor(py, self.rows.to_vec(), "int64"))
    }
}

impl Rows {
    /// Makes rows from their numbers.
    pub fn of(rows: Vec<usize>) -> Self {
        let start = rows.first().copied().unwrap_or_default();
        if rows.iter().enumerate().all(|(at, row)| *row == start + at) {
            return Self::Range {
                start,
                length: rows.len(),
            };
        }
        Self::Index(Index::of(rows))
    }

    /// Returns the rows at `places`; None if a place is out of range.
    pub fn at(&self, places: &[TokenPlace]) -> Option<Self> {
        let rows: Vec<_> = self.iter().collect();
        let chosen = places.iter().map(|place| rows.get(place.0).copied());
        chosen.collect::<Option<_>>().map(Self::of)
    }

    /// True if they are all of `size` rows, in order.
    pub fn all(&self, size: usize) -> bool {
        matches!(self, Self::Range { start: 0, length } if *length == size)
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Range { length, .. } => *length,
            Self::Index(index) => index.rows.len(),
        }
    }

    /// The row after the last one.
    pub fn end(&self) -> usize {
        match self {
            Self::Range { length: 0, .. } => 0,
            Self::Range { start, length } => start.saturating_add(*length),
            Self::Index(index) => index.rows.iter().max().map_or(0, |last| last + 1),
        }
    }

    pub fn iter(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self {
            Self::Range { start, length } => Box::new(*start..start + length),
            Self::Index(index) => Box::new(index.rows.iter().copied()),
        }
    }

    /// True if [`Self::narrow`] copies.
    pub fn copies(&self) -> bool {
        matches!(self, Self::Index(_))
    }

    /// Takes the rows of a tensor: a view of a range, a copy else.
    pub fn narrow<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dim: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        match self {
            // Two thirds of the time of `narrow`.
            Self::Range { start, length } if dim == 0 && Facts::is_plain(tensor)? => {
                let [start, end] = [*start, start + length].map(isize::try_from);
                tensor.get_item(PySlice::new(py, start?, end?, 1))
            }
            Self::Range { start, length } => {
                tensor.call_method1(intern!(py, "narrow"), (dim, *start, *length))
            }
            Self::Index(index) => {
                let index = index.on_device_of(tensor)?;
                tensor.call_method1(intern!(py, "index_select"), (dim, index))
            }
        }
    }

    /// Copies the rows of a tensor.
    pub fn copy<'py>(&self, tensor: &Bound<'py, PyAny>, dim: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        match self {
            // Two thirds of the time of a view and its copy; it has a derivative from torch 2.13 on.
            Self::Range { start, length }
                if Facts::is_plain(tensor)? && !requires_grad(tensor)? =>
            {
                tensor.call_method1(intern!(py, "narrow_copy"), (dim, *start, *length))
            }
            Self::Range { .. } => self.narrow(tensor, dim)?.call_method0(intern!(py, "clone")),
            Self::Index(_) => self.narrow(tensor, dim),
        }
    }

    /// Writes the rows of a tensor in place.
    pub fn write<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dim: usize,
        values: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = tensor.py();
        match self {
            Self::Range { .. } if Facts::is_plain(tensor)? => {
                let rows = self.narrow(tensor, dim)?;
                rows.call_method1(intern!(py, "copy_"), (values,))?;
            }
            // Rows of a subclass need not be a view: a write to rows of a `MaskedTensor` is lost.
            Self::Range { start, length } => {
                let scattered = (values, dim, *start, start + length);
                let whole = tensor.call_method1(intern!(py, "slice_scatter"), scattered)?;
                tensor.call_method1(intern!(py, "copy_"), (whole,))?;
            }
            Self::Index(index) => {
                let index = index.on_device_of(tensor)?;
                tensor.call_method1(intern!(py, "index_copy_"), (dim, index, values))?;
            }
        }
        Ok(())
    }
}

/// Rows of a member in the batch.
#[derive(Clone, PartialEq, Eq)]
pub struct BatchRows(pub Rows);

impl BatchRows {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = BatchRow> + '_ {
        self.0.iter().map(BatchRow)
    }

    /// Returns the rows in tensors that have the rows of the batch.
    pub fn in_tensors(&self) -> &Rows {
        &self.0
    }
}

/// Rows of several members of a batch, and the member of each.
pub struct Selection {
    pub rows: Rows,
    /// Number of each row's member, whose rows follow each other; None if each has one row.
    pub members: Option<Index>,
    /// Rows of each member, if all have as many.
    pub each: Option<usize>,
}

/// Members of a selection: number, and the index of its positions, if it is of some.
pub type PartKeys = Vec<(usize, Option<usize>)>;

/// Selections of a batch, each made when it is first needed.
#[derive(Default)]
pub struct Selections(Mutex<Vec<(PartKeys, Arc<Selection>)>>);

impl Selections {
    /// Returns the selection of the members with these rows, in order.
    pub fn get(&self, key: PartKeys, rows: &[&Rows]) -> Arc<Selection> {
        let mut made = self.0.lock();
        if let Some((_, found)) = made.iter().find(|(of, _)| *of == key) {
            return Arc::clone(found);
        }
        let selection = Arc::new(Selection::of(rows));
        made.push((key, Arc::clone(&selection)));
        selection
    }

    pub fn clear(&self) {
        // Dropped after the lock is released: destructors of tensors run code.
        let _former = mem::take(&mut *self.0.lock());
    }
}

impl Selection {
    pub fn of(rows: &[&Rows]) -> Self {
        let each = rows.first().map(|first| first.len());
        let each = each.filter(|each| rows.iter().all(|rows| rows.len() == *each));
        let members = rows.iter().enumerate();
        let members = members.flat_map(|(member, rows)| std::iter::repeat_n(member, rows.len()));
        Self {
            rows: Rows::of(rows.iter().flat_map(|rows| rows.iter()).collect()),
            members: (each != Some(1)).then(|| Index::of(members.collect())),
            each,
        }
    }
}

/// Length of a dimension of a tensor; None if it has fewer, and for a nested one, whose rows cannot
/// be taken by their numbers.
pub fn length(tensor: &Bound<'_, PyAny>, dim: usize) -> PyResult<Option<usize>> {
    let shape = tensor.getattr(intern!(tensor.py(), "shape"));
    // A strided nested tensor has no shape, and one in another layout is of a subclass.
    if (shape.is_err() || !Facts::is_plain(tensor)?) && is_nested(tensor)? {
        return Ok(None);
    }
    let shape = shape?;
    let shape = shape.cast::<PyTuple>()?;
    if shape.len() <= dim {
        return Ok(None);
    }
    shape.get_borrowed_item(dim)?.extract().map(Some)
}
