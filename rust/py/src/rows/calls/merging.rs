//! Hooks of many members of a batch that run as one.

use std::borrow::Cow;
use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::{PyClass, PyTypeCheck};

use crate::hooks::hook::Hook;
use crate::hooks::native::{Extension, Native, NativeHook};
use crate::rows::layout::Layout;
use crate::rows::numbers::{Rows, Selection, Selections};
use crate::rows::places::{MemberPlace, TokenPositions, Tokens};
use crate::torch::tensors::{any_tensor, part_of, summed, tensors_of};

/// Index of the plan's positions, and the places of their rows in the member; None for all rows.
pub type Places = Option<(usize, Vec<MemberPlace>)>;

/// Form of a hook that runs for many members of a batch at once.
pub struct Merging {
    pub hook: Py<PyAny>,
    pub at: Places,
    /// True if it may be kept for later calls: it refers to nothing that a request captured.
    pub lasts: bool,
}

/// Merged hook of one member.
pub struct MergedPart<'a, 'py> {
    pub hook: &'a Bound<'py, PyAny>,
    /// Number of the member, and the index of its positions, if it is of some.
    pub key: (usize, Option<usize>),
    /// Rows that it is for.
    pub rows: Cow<'a, Rows>,
}

/// Groups parts whose hooks are alike: numbers of the parts, in order.
pub fn groups<T: PyTypeCheck>(
    parts: &[MergedPart<'_, '_>],
    alike: impl Fn(&Bound<'_, T>, &Bound<'_, T>) -> PyResult<bool>,
) -> PyResult<Vec<Vec<usize>>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let hook = part.hook.cast()?;
        let mut found = None;
        for group in &mut groups {
            if alike(parts[group[0]].hook.cast()?, hook)? {
                found = Some(group);
                break;
            }
        }
        match found {
            Some(group) => group.push(number),
            None => groups.push(vec![number]),
        }
    }
    Ok(groups)
}

/// True if both hooks are for the same part of a value; None is the whole.
pub fn same_part(
    py: Python<'_>,
    first: Option<&Py<PyAny>>,
    second: Option<&Py<PyAny>>,
) -> PyResult<bool> {
    match (first, second) {
        (None, None) => Ok(true),
        (Some(first), Some(second)) => first.bind(py).eq(second),
        _ => Ok(false),
    }
}

/// Returns the part of a value of a whole batch that an index, key or attribute names: tensors of the
/// value, or a sum of them. Raises for an index of a tensor, which counts the rows of each member.
pub fn whole_part_of<'py>(
    value: &Bound<'py, PyAny>,
    named: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let part = part_of(value, named)?;
    if summed(value, named).is_some() {
        return Ok(part);
    }
    let known = tensors_of(value)?;
    let mut indexed = |tensor: &Bound<'_, PyAny>| Ok(!known.iter().any(|each| each.is(tensor)));
    if any_tensor(&part, &mut indexed)? {
        return Err(PyIndexError::new_err("an index of a tensor"));
    }
    Ok(part)
}

/// Finds the rows of some parts together.
pub struct Select<'a>(
    /// None if the module has its own row layout.
    pub Option<&'a Selections>,
);

impl Select<'_> {
    /// `group`: numbers of the parts.
    pub fn rows(&self, parts: &[MergedPart<'_, '_>], group: &[usize]) -> Arc<Selection> {
        let rows: Vec<&Rows> = group.iter().map(|part| &*parts[*part].rows).collect();
        match self.0 {
            Some(made) => made.get(group.iter().map(|part| parts[*part].key).collect(), &rows),
            None => Arc::new(Selection::of(&rows)),
        }
    }
}

/// Value of the whole batch that merged hooks run for. Parts are named by their numbers.
pub struct SharedValue<'a, 'py> {
    pub value: &'a Bound<'py, PyAny>,
    pub layout: &'a Layout,
    /// True if a member may write in place.
    pub written: bool,
    /// Returns a part's member.
    pub owner: &'a dyn Fn(usize) -> Bound<'py, PyAny>,
    /// Returns the tokens of a part's member.
    pub tokens: &'a dyn Fn(usize) -> Tokens,
    /// Returns the positions of a part's tokens, if known.
    pub positions: &'a dyn Fn(usize) -> Option<TokenPositions>,
    /// Describes hook, phase and module of a part, for errors.
    pub describe: &'a dyn Fn(usize) -> String,
}

/// Merged hooks of some members that are alike, for calls with the same rows.
pub trait Joint: Send + Sync {
    /// Runs the hooks on the result of those before them. An error of one part fails its member; after
    /// an error of all, each hook runs separately.
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()>;

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError>;
}

/// Merged hooks of one class, in the order in which they run.
pub type Joints = Vec<Box<dyn Joint>>;

/// Result of merged hooks.
#[derive(Default)]
pub struct MergedResult<'py> {
    /// Replacement of the value.
    pub value: Option<Bound<'py, PyAny>>,
    /// Parts that failed.
    pub failed: Vec<(usize, PyErr)>,
}

impl<'py> MergedResult<'py> {
    /// The value so far.
    pub fn now<'a>(&'a self, shared: &'a SharedValue<'_, 'py>) -> &'a Bound<'py, PyAny> {
        self.value.as_ref().unwrap_or(shared.value)
    }
}

/// Native hook that says how it runs in batches.
pub trait InBatch: Native {
    /// True if it keeps the value, which no hook may write to later.
    fn keeps(&self) -> bool {
        false
    }

    /// False if it reads no value, whose rows need not be found then. `positioned`: the batch knows
    /// the positions of its rows.
    fn reads(&self, _positioned: bool) -> bool {
        true
    }

    /// Returns the address of the object that it checks, if it does nothing else: of the members of a
    /// batch that check the same, one does.
    fn checks(&self) -> Option<usize> {
        None
    }

    /// Returns its form that runs for many members of a batch at once; None if it runs for each
    /// separately. `object`: the hook itself; `owner`: the member.
    fn merges(
        &self,
        _object: &Bound<'_, PyAny>,
        _phase: Phase,
        _owner: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Merging>> {
        Ok(None)
    }

    /// Returns the parts, of hooks of this class, for which the [merged](Self::merges) hook cannot
    /// run. `describe`: describes hook, phase and module of a part, for errors.
    fn check_parts<'py>(
        &self,
        _parts: &[MergedPart<'_, 'py>],
        _value: &Bound<'py, PyAny>,
        _describe: &dyn Fn(usize) -> String,
    ) -> PyResult<Vec<(usize, PyErr)>> {
        Ok(Vec::new())
    }

    /// Joins [merged](Self::merges) hooks of this class, one of each of some members. A class without
    /// hooks that merge is never asked.
    fn join(&self, _parts: &[MergedPart<'_, '_>], _select: &Select<'_>) -> PyResult<Joints> {
        Err(PyNotImplementedError::new_err(
            "hooks that merge are joined",
        ))
    }
}

struct Extended(for<'a, 'py> fn(&'a Bound<'py, PyAny>) -> PyResult<&'a dyn InBatch>);

/// The [`Native::extension`] of a class that says how its hooks run in batches.
pub fn in_batch<T: InBatch + PyClass<Frozen = True>>() -> &'static Extension {
    const { &Extended(|object| Ok(object.cast::<T>()?.get())) }
}

/// Returns how a hook runs in batches; None for one that runs for each member on its own.
pub fn of_hook<'a>(py: Python<'a>, hook: &'a Hook) -> Option<&'a dyn InBatch> {
    let Extended(cast) = hook.native(py)?.extension()?.downcast_ref()?;
    cast(hook.object().bind(py)).ok()
}

/// Returns how a hook that merges runs in batches.
pub fn in_batch_of<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a dyn InBatch> {
    let class = object.cast::<NativeHook>()?.get().class();
    let extension = class(object)?.extension();
    let Some(Extended(cast)) = extension.and_then(|it| it.downcast_ref()) else {
        return Err(PyTypeError::new_err(
            "a hook that merges says how it runs in batches",
        ));
    };
    cast(object)
}
