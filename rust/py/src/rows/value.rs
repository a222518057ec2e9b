//! A value of the whole batch, of which each member sees and changes its own rows.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrohook_core::Entry;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call::Call;
use crate::call::stop::Stop;
use crate::error::{rows_error, type_name};
use crate::hooks::hook::Hook;
use crate::rows::batch::BatchBase;
use crate::rows::layout::Layout;
use crate::rows::member::Member;
use crate::rows::merging::{InBatch, of_hook};
use crate::rows::numbers::Rows;
use crate::torch::tensors::{for_each_pair, for_each_tensor, map_tensors, version_if_any};

/// Takes the exception of a member's hook: it fails the member alone, unless it is no fault.
pub fn settle(py: Python<'_>, member: &Member, error: PyErr) -> PyResult<()> {
    // The forward is shared: a capture ends it for nobody.
    if error.is_instance_of::<Stop>(py) {
        return Ok(());
    }
    member.settle(py, error)
}

/// Marks that hooks of a member run.
pub fn note_run(member: &Member) {
    // Relaxed: a flag that orders nothing.
    member.ran.store(true, Ordering::Relaxed);
}

/// A tensor that a member's hooks get.
struct Given<'py> {
    tensor: Bound<'py, PyAny>,
    /// True if it is narrowed to the member's rows.
    narrowed: bool,
    /// Version of a copy, on which a write in place has to be found; None without a counter.
    version: Option<i64>,
}

/// Structure of tensors narrowed to the rows of a member.
pub struct Narrowed<'py> {
    pub value: Bound<'py, PyAny>,
    given: Vec<Given<'py>>,
    copies: bool,
}

/// A value of the whole batch, and the rows of it that members changed.
pub struct Value<'a, 'py> {
    whole: &'a Bound<'py, PyAny>,
    layout: &'a Layout,
    batch: &'a BatchBase,
    changes: Vec<Vec<(usize, Bound<'py, PyAny>)>>,
}

impl<'a, 'py> Value<'a, 'py> {
    pub fn new(whole: &'a Bound<'py, PyAny>, layout: &'a Layout, batch: &'a BatchBase) -> Self {
        Self {
            whole,
            layout,
            batch,
            changes: Vec::new(),
        }
    }

    fn rows(&self, member: usize) -> &'a Rows {
        self.layout.rows(self.batch.all(), member)
    }

    /// Drops the changes of a member.
    fn forget(&mut self, member: usize) {
        for changes in &mut self.changes {
            changes.retain(|(of, _)| *of != member);
        }
    }

    /// True if one of its tensors has the rows.
    pub fn covered(&self) -> PyResult<bool> {
        let mut covered = false;
        for_each_tensor(self.whole, &mut |tensor| {
            covered = covered || self.layout.covers(tensor)?;
            Ok(())
        })?;
        Ok(covered)
    }

    /// Makes the error for a value without a tensor that has the rows.
    pub fn not_covered(&self, describe: &str) -> PyErr {
        let py = self.whole.py();
        let mut shapes = Vec::new();
        let _ = for_each_tensor(self.whole, &mut |tensor| {
            let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
            shapes.push(format!("{shape:?}"));
            Ok(())
        });
        let shapes = if shapes.is_empty() {
            format!("no tensor, but {}", type_name(self.whole))
        } else {
            format!("tensors of the shapes {}", shapes.join(", "))
        };
        let (rows, dim) = (self.layout.size, self.layout.dim);
        let message = format!(
            "{describe}: the {rows} rows of the batch are found in dimension {dim} of no tensor; \
             the module has {shapes}. Say which they are by `gathered`, or how many by `size`"
        );
        rows_error(py, message)
    }

    /// Narrows the tensors that have the rows to those of a member.
    pub fn narrow(&self, member: usize, needs: &Needs) -> PyResult<Narrowed<'py>> {
        let rows = self.rows(member);
        // A write of another member would make what is kept stale, though in other rows.
        // A hook that came after captures without copies gets copies itself.
        let python = self.batch.runs_python();
        let clones = !rows.copies() && if python { needs.keeps } else { needs.python };
        let copies = clones || rows.copies();
        let mut given = Vec::new();
        let value = map_tensors(self.whole, &mut |tensor| {
            let narrowed = self.layout.covers(tensor)?;
            let mut tensor = tensor.clone();
            if narrowed {
                tensor = rows.narrow(&tensor, self.layout.dim)?;
                if clones {
                    tensor = tensor.call_method0(intern!(tensor.py(), "clone"))?;
                }
            }
            let version = if narrowed && copies {
                version_if_any(&tensor)?
            } else {
                None
            };
            given.push(Given {
                tensor: tensor.clone(),
                narrowed,
                version,
            });
            Ok(tensor)
        })?;
        Ok(Narrowed {
            value,
            given,
            copies,
        })
    }

    /// Collects the rows that a member changed: those returned, and those of copies written in
    /// place; `wrote`: a hook of it may have written.
    pub fn take(
        &mut self,
        member: usize,
        narrowed: &Narrowed<'py>,
        result: &Bound<'py, PyAny>,
        wrote: bool,
        describe: &str,
    ) -> PyResult<()> {
        let py = self.whole.py();
        let (mut at, mut changed) = (0, Vec::new());
        let same = for_each_pair(self.whole, result, &mut |_, new| {
            let Some(given) = narrowed.given.get(at) else {
                return Ok(());
            };
            if !new.is(&given.tensor) {
                if !given.narrowed {
                    return Err(rows_error(
                        py,
                        format!("{describe} replaces a tensor that has no rows of the batch"),
                    ));
                }
                check_same(describe, &given.tensor, new)?;
                changed.push((at, new.clone()));
            } else if given.narrowed && narrowed.copies && wrote {
                let written = given.version.is_none() || version_if_any(new)? != given.version;
                if written {
                    changed.push((at, new.clone()));
                }
            }
            at += 1;
            Ok(())
        })?;
        if !same || at != narrowed.given.len() {
            let message = format!(
                "{describe} returns another structure than it got, or changes a part of it that \
                 all rows share"
            );
            return Err(rows_error(py, message));
        }
        self.changes.resize_with(narrowed.given.len(), Vec::new);
        for (at, new) in changed {
            self.changes[at].push((member, new));
        }
        Ok(())
    }

    /// Returns the value with the changed rows; None if there are none. Makes one copy of each
    /// changed tensor. A member whose rows cannot be written fails alone.
    pub fn merged(&mut self) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.whole.py();
        while self.changes.iter().any(|changes| !changes.is_empty()) {
            let mut writing = None;
            match self.written(&mut writing) {
                Ok(merged) => return Ok(Some(merged)),
                Err(error) => {
                    let member = writing.ok_or_else(|| error.clone_ref(py))?;
                    settle(py, &self.batch.all()[member], error)?;
                    self.forget(member);
                }
            }
        }
        Ok(None)
    }

    /// Writes the changed rows to copies; `writing`: the member whose rows are written.
    fn written(&self, writing: &mut Option<usize>) -> PyResult<Bound<'py, PyAny>> {
        let mut changes = self.changes.iter();
        map_tensors(self.whole, &mut |tensor| {
            let changes = changes.next().map_or(&[][..], Vec::as_slice);
            let mut copy = tensor.clone();
            for (nth, (member, rows)) in changes.iter().enumerate() {
                *writing = Some(*member);
                if nth == 0 {
                    copy = copy.call_method0(intern!(tensor.py(), "clone"))?;
                }
                self.rows(*member).write(&copy, self.layout.dim, rows)?;
            }
            *writing = None;
            Ok(copy)
        })
    }
}

/// Raises unless a tensor can stand for another: same shape, dtype, device and layout.
fn check_same<'py>(
    describe: &str,
    given: &Bound<'py, PyAny>,
    new: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = given.py();
    for name in ["shape", "dtype", "device", "layout"] {
        let (expected, got) = (given.getattr(name)?, new.getattr(name)?);
        if !expected.eq(&got)? {
            let message = format!(
                "{describe} returns other rows than it got: a tensor of {name} {got} in place of \
                 {expected}"
            );
            return Err(rows_error(py, message));
        }
    }
    Ok(())
}

/// Returns the address of the object that the hooks of a member check, if they do nothing else.
pub fn checks(py: Python<'_>, entries: &[Arc<Entry<Hook>>]) -> Option<usize> {
    match entries {
        [entry] => of_hook(py, entry.hook())?.checks(),
        _ => None,
    }
}

/// Returns the arguments of a call as one structure.
pub fn arguments<'py>(call: &Call<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = call.module.py();
    let kwargs = call.kwargs.as_ref();
    let kwargs = kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
    Ok(PyTuple::new(py, [call.args.as_any(), kwargs.as_any()])?.into_any())
}

/// Needs of some hooks of a member.
pub struct Needs {
    /// True if one reads the value.
    pub reads: bool,
    /// True if one runs Python, which may write in place.
    pub python: bool,
    /// True if one keeps the value.
    keeps: bool,
}

impl Needs {
    pub fn of(py: Python<'_>, entries: &[Arc<Entry<Hook>>], positioned: bool) -> Self {
        let mut needs = Self {
            reads: false,
            python: false,
            keeps: false,
        };
        for entry in entries {
            let hook = entry.hook();
            let ways = of_hook(py, hook);
            needs.reads |= ways.is_none_or(|ways| ways.reads(positioned));
            needs.python |= hook.runs_python(py);
            needs.keeps |= ways.is_some_and(InBatch::keeps);
        }
        needs
    }
}
