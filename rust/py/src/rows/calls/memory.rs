//! Tensors of a value that share memory, and copies of rows that share theirs in the same way.

use pyo3::prelude::*;
use pyo3::types::PyString;
use pyo3::{ffi, intern};

use crate::rows::layout::Layout;
use crate::rows::numbers::Rows;
use crate::torch::facts::Facts;
use crate::torch::tensors::for_each_tensor;

/// Tensors that hooks get, by the memory that they share.
pub struct SharedMemory<'py> {
    groups: Vec<MemoryGroup<'py>>,
}

/// Different tensors with one storage, at least two.
struct MemoryGroup<'py> {
    tensors: Vec<Bound<'py, PyAny>>,
    /// True if all are of the first structure, have rows of the batch and can be replaced.
    within: bool,
    /// True if all have numbers in several places.
    expanded: bool,
    /// None if the rows of these tensors are in no blocks of the memory.
    blocks: Option<Blocks<'py>>,
    /// True if copies of rows share no memory where these tensors do.
    apart: bool,
}

/// Memory of tensors that hold each row of the batch in a separate block.
struct Blocks<'py> {
    /// Tensor of (rows, numbers of a block).
    all: Bound<'py, PyAny>,
    start: usize,
    width: usize,
}

/// Copies of blocks for one member: number of the group, and the copy.
pub type BlockCopies<'py> = Vec<(usize, Bound<'py, PyAny>)>;

/// Place of a tensor's numbers in its storage.
struct Form {
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
}

impl Form {
    fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let offset = tensor.call_method0(intern!(py, "storage_offset"))?;
        Ok(Self {
            shape: tensor.getattr(intern!(py, "shape"))?.extract()?,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
            offset: offset.extract()?,
        })
    }

    /// Dimensions along which all numbers are one.
    fn expanded(&self) -> Vec<usize> {
        let dims = self.shape.iter().zip(&self.strides).enumerate();
        let expanded = dims.filter(|(_, (length, stride))| **length > 1 && **stride == 0);
        expanded.map(|(at, _)| at).collect()
    }

    /// Returns how many places of the storage a row spans, from its first number to its last.
    fn span(&self, dim: usize) -> usize {
        let dims = self.shape.iter().zip(&self.strides).enumerate();
        let others = dims.filter(|(at, _)| *at != dim).map(|(_, it)| it);
        let last = others.map(|(length, stride)| Some(length.checked_sub(1)? * stride));
        // None for an empty row, which may stand at the end of the storage.
        last.sum::<Option<usize>>().map_or(0, |last| last + 1)
    }
}

impl<'py> SharedMemory<'py> {
    /// Finds the memory of some structures; `other`: layout of tensors whose rows are copied elsewhere;
    /// `grad`: copies of them are part of a graph.
    pub fn among<'a>(
        structures: impl Iterator<Item = &'a Bound<'py, PyAny>>,
        layout: &Layout,
        other: Option<&Layout>,
        grad: bool,
    ) -> PyResult<Self>
    where
        'py: 'a,
    {
        // Address, tensors, and whether all are of the first structure.
        let mut found: Vec<(usize, Vec<Bound<'py, PyAny>>, bool)> = Vec::new();
        for (number, structure) in structures.enumerate() {
            for_each_tensor(structure, &mut |tensor| {
                let Some(address) = Facts::address_of_storage(tensor)? else {
                    return Ok(());
                };
                let first = number == 0;
                let Some((_, tensors, within)) = found.iter_mut().find(|it| it.0 == address) else {
                    found.push((address, vec![tensor.clone()], first));
                    return Ok(());
                };
                *within &= first;
                if !tensors.iter().any(|each| each.is(tensor)) {
                    tensors.push(tensor.clone());
                }
                Ok(())
            })?;
        }
        let mut groups = Vec::new();
        for (_, tensors, within) in found {
            let (mut having, mut expanded, mut elsewhere) = (Vec::new(), 0, false);
            for tensor in &tensors {
                if layout.covers(tensor)? {
                    having.push(tensor.clone());
                    expanded += usize::from(is_expanded(tensor)?);
                } else if let Some(other) = other {
                    elsewhere |= other.covers(tensor)?;
                }
            }
            // A single argument that is the output itself shares memory with no other.
            if tensors.len() < 2 && within {
                continue;
            }
            let blocks = Blocks::of(&having, layout, grad)?;
            let alike = expanded == 0 || expanded == having.len();
            groups.push(MemoryGroup {
                within: within && alike && having.len() == tensors.len(),
                expanded: expanded == having.len(),
                apart: elsewhere || (having.len() > 1 && blocks.is_none()),
                blocks,
                tensors: having,
            });
        }
        Ok(Self { groups })
    }

    fn group(&self, tensor: &Bound<'py, PyAny>) -> Option<(usize, &MemoryGroup<'py>)> {
        let has = |group: &MemoryGroup<'py>| group.tensors.iter().any(|each| each.is(tensor));
        let mut groups = self.groups.iter().enumerate();
        groups.find(|(_, group)| has(group))
    }

    /// True if it shares memory with nothing but tensors of the first structure that have rows.
    pub fn only_within(&self, tensor: &Bound<'py, PyAny>) -> bool {
        self.group(tensor).is_none_or(|(_, group)| group.within)
    }

    /// True if a write to a copy of its rows shows in no copy of another tensor that is not expanded.
    pub fn is_lone(&self, tensor: &Bound<'py, PyAny>) -> bool {
        let lone = |(_, group): (_, &MemoryGroup<'py>)| group.apart || group.expanded;
        self.group(tensor).is_none_or(lone)
    }

    /// True if copies of its rows share no memory where it does.
    pub fn apart(&self, tensor: &Bound<'py, PyAny>) -> bool {
        self.group(tensor).is_some_and(|(_, group)| group.apart)
    }

    /// Copies rows of a tensor. Tensors that share memory share one copy of it.
    pub fn copy(
        &self,
        copies: &mut BlockCopies<'py>,
        tensor: &Bound<'py, PyAny>,
        rows: &Rows,
        dim: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some((number, Some(blocks))) = self
            .group(tensor)
            .map(|(number, group)| (number, group.blocks.as_ref()))
        else {
            return copy_of(tensor, rows, dim);
        };
        let made = copies.iter().find(|(of, _)| *of == number);
        let copy = if let Some((_, copy)) = made {
            copy.clone()
        } else {
            let copy = copy_of(&blocks.all, rows, 0)?;
            copies.push((number, copy.clone()));
            copy
        };
        let mut form = Form::of(tensor)?;
        form.shape[dim] = rows.len();
        form.strides[dim] = blocks.width;
        let place = (form.shape, form.strides, form.offset - blocks.start);
        copy.call_method1(intern!(copy.py(), "as_strided"), place)
    }
}

impl<'py> Blocks<'py> {
    /// Finds the blocks of tensors with one storage; None if there are none, or only one tensor.
    fn of(tensors: &[Bound<'py, PyAny>], layout: &Layout, grad: bool) -> PyResult<Option<Self>> {
        let [first, _, ..] = tensors else {
            return Ok(None);
        };
        let base_of = |tensor: &Bound<'py, PyAny>| {
            let base = tensor.getattr(intern!(tensor.py(), "_base"))?;
            PyResult::Ok(if base.is_none() { tensor.clone() } else { base })
        };
        // A gradient goes the way of the views.
        let base = if grad { base_of(first)? } else { first.clone() };
        let read = read_as(&base)?;
        let mut forms = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if (grad && !base_of(tensor)?.is(&base)) || read_as(tensor)? != read {
                return Ok(None);
            }
            let Ok(form) = Form::of(tensor) else {
                return Ok(None);
            };
            forms.push(form);
        }
        let (dim, size) = (layout.dim, layout.size);
        let start = forms.iter().map(|it| it.offset).min().unwrap_or_default();
        let ends = forms.iter().map(|it| it.offset + it.span(dim));
        let width = ends.max().unwrap_or_default() - start;
        let step = if size == 1 {
            width
        } else {
            forms[0].strides[dim]
        };
        let alike = size == 1 || forms.iter().all(|it| it.strides[dim] == step);
        if !alike || width > step {
            return Ok(None);
        }
        let place = ((size, width), (step, 1), start);
        let all = base.call_method1(intern!(base.py(), "as_strided"), place)?;
        Ok(Some(Self { all, start, width }))
    }
}

/// Returns how the numbers of a tensor are read from its storage: the dtype, whether they are conjugate,
/// and whether they are negative.
fn read_as(tensor: &Bound<'_, PyAny>) -> PyResult<(*mut ffi::PyObject, bool, bool)> {
    let py = tensor.py();
    let is = |name: &Bound<'_, PyString>| tensor.call_method0(name)?.is_truthy();
    Ok((
        tensor.getattr(intern!(py, "dtype"))?.as_ptr(), // one object for each dtype
        is(intern!(py, "is_conj"))?,
        is(intern!(py, "is_neg"))?,
    ))
}

/// True if a tensor has a number in several places, so that it cannot be written in place.
pub fn is_expanded(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let plain = Facts::is_plain(tensor)?;
    Ok(plain && Form::of(tensor).is_ok_and(|form| !form.expanded().is_empty()))
}

/// Copies rows of a tensor. Numbers that it has in several places stand in one place of the copy, so
/// that a write in place is refused there as outside of a batch.
fn copy_of<'py>(
    tensor: &Bound<'py, PyAny>,
    rows: &Rows,
    dim: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let form = if Facts::is_plain(tensor)? {
        Form::of(tensor).ok()
    } else {
        None
    };
    let expanded = form.as_ref().map_or_else(Vec::new, Form::expanded);
    let mut own = tensor.clone();
    for at in &expanded {
        own = own.call_method1(intern!(py, "narrow"), (*at, 0, 1))?;
    }
    own = if expanded.contains(&dim) {
        own.call_method0(intern!(py, "clone"))?
    } else {
        rows.copy(&own, dim)?
    };
    match form {
        Some(form) if !expanded.is_empty() => {
            let mut shape = form.shape;
            shape[dim] = rows.len();
            own.call_method1(intern!(py, "expand"), (shape,))
        }
        _ => Ok(own),
    }
}
