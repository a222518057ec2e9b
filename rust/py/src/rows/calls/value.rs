//! A value of the whole batch, of which each member sees and changes its own rows.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrohook_core::Entry;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call::Call;
use crate::error::{rows_error, type_name};
use crate::hooks::hook::Hook;
use crate::hooks::site::annotate;
use crate::rows::batch::BatchBase;
use crate::rows::calls::memory::{BlockCopies, SharedMemory, is_expanded};
use crate::rows::calls::merging::{InBatch, of_hook};
use crate::rows::calls::stand_ins::StandIns;
use crate::rows::layout::Layout;
use crate::rows::member::Member;
use crate::rows::numbers::Rows;
use crate::torch;
use crate::torch::facts::Facts;
use crate::torch::nested::is_nested;
use crate::torch::saved::{is_saved, is_saved_between};
use crate::torch::tensors::{any_tensor, for_each_pair, map_tensors, tensors_of, version_if_any};

/// Marks that hooks of a member run.
pub fn note_run(member: &Member) {
    // Relaxed: a flag that orders nothing.
    member.ran.store(true, Ordering::Relaxed);
}

/// A tensor of the batch, as the hooks of a member get it.
struct Given<'py> {
    whole: Bound<'py, PyAny>,
    tensor: Bound<'py, PyAny>,
    /// True if it is narrowed to the member's rows.
    narrowed: bool,
    /// True if a write in place does not change the rows of the whole.
    copied: bool,
    /// Version as it was given; None without a counter.
    version: Option<i64>,
}

/// Copy of a tensor that all rows share, for hooks that run Python.
struct Lent<'py> {
    whole: Bound<'py, PyAny>,
    copy: Bound<'py, PyAny>,
    version: Option<i64>,
}

impl Given<'_> {
    /// True if it was written in place; of rows without a counter, always.
    fn written(&self) -> PyResult<bool> {
        if self.version.is_some() {
            return Ok(version_if_any(&self.tensor)? != self.version);
        }
        if self.narrowed || self.tensor.is(&self.whole) {
            return Ok(self.narrowed);
        }
        let equal = intern!(self.whole.py(), "equal");
        let same = self.whole.call_method1(equal, (&self.tensor,))?;
        Ok(!same.is_truthy()?)
    }
}

/// Hooks that changed a member's value, for error messages.
struct Trail<'a, 'py> {
    first: &'a Entry<Hook>,
    /// Each hook that returned something, and that.
    returned: Vec<(&'a Entry<Hook>, Bound<'py, PyAny>)>,
    /// The last hook that wrote in place.
    wrote: Option<&'a Entry<Hook>>,
    /// Number of writes in place so far.
    versions: i64,
}

/// Tensors as the hooks of one member get them.
pub struct Narrowed<'a, 'py> {
    member: usize,
    rows: &'a Rows,
    /// True if each gets a copy of its rows, which may be written in place.
    copies: bool,
    python: bool,
    given: Vec<Given<'py>>,
    blocks: BlockCopies<'py>,
    trail: Trail<'a, 'py>,
}

impl<'a, 'py> Narrowed<'a, 'py> {
    /// Returns the last hook that wrote in place.
    fn wrote(&self) -> &'a Entry<Hook> {
        self.trail.wrote.unwrap_or(self.trail.first)
    }

    fn of_whole(&self, whole: &Bound<'py, PyAny>) -> Option<&Given<'py>> {
        self.given.iter().find(|given| given.whole.is(whole))
    }

    /// Returns the tensor of the batch whose rows a tensor is.
    fn whole_of(&self, tensor: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let given = self.given.iter().find(|given| given.tensor.is(tensor));
        given.map(|given| given.whole.clone())
    }

    /// Records that a hook ran, and its result.
    pub fn note(
        &mut self,
        hook: &'a Entry<Hook>,
        returned: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        self.trail
            .returned
            .extend(returned.map(|value| (hook, value)));
        if self.python {
            let mut versions = 0;
            for given in &self.given {
                if given.version.is_some() {
                    versions += version_if_any(&given.tensor)?.unwrap_or_default();
                }
            }
            if versions != self.trail.versions {
                (self.trail.versions, self.trail.wrote) = (versions, Some(hook));
            }
        }
        Ok(())
    }
}

/// Rows of a tensor that a member changed, and the hook that did.
struct Changed<'a, 'py> {
    member: usize,
    hook: &'a Entry<Hook>,
    rows: Bound<'py, PyAny>,
    /// The tensor of the batch whose rows it returned, if it did.
    whole: Option<Bound<'py, PyAny>>,
}

/// A value of the whole batch, and the rows of it that members changed.
pub struct Value<'a, 'py> {
    whole: &'a Bound<'py, PyAny>,
    /// Arguments of the call, which forward hooks get beside the output.
    beside: Option<&'a Bound<'py, PyAny>>,
    layout: &'a Layout,
    /// Layout of the tensors that hooks get from elsewhere in the same call.
    other: Option<&'a Layout>,
    batch: &'a BatchBase,
    describe: &'a dyn Fn(&Entry<Hook>) -> String,
    grad: bool,
    /// Tensors that share memory, once they are needed.
    shared: Option<SharedMemory<'py>>,
    /// Arguments of the call that members replaced.
    pub stand_ins: Option<&'a StandIns>,
    lent: Vec<Lent<'py>>,
    changes: Vec<Vec<Changed<'a, 'py>>>,
}

impl<'a, 'py> Value<'a, 'py> {
    pub fn new(
        whole: &'a Bound<'py, PyAny>,
        beside: Option<&'a Bound<'py, PyAny>>,
        layout: &'a Layout,
        batch: &'a BatchBase,
        describe: &'a dyn Fn(&Entry<Hook>) -> String,
    ) -> PyResult<Self> {
        Ok(Self {
            whole,
            beside,
            layout,
            other: None,
            batch,
            describe,
            grad: torch::is_grad_enabled(whole.py())?,
            shared: None,
            stand_ins: None,
            lent: Vec::new(),
            changes: Vec::new(),
        })
    }

    /// Returns it for hooks that get tensors of another layout too.
    pub const fn with(mut self, other: Option<&'a Layout>) -> Self {
        self.other = other;
        self
    }

    /// Makes the error for a value without a tensor that has the rows.
    pub fn not_covered(&self, entries: &[Arc<Entry<Hook>>]) -> PyErr {
        let py = self.whole.py();
        let shape = |tensor: &Bound<'_, PyAny>| {
            if is_nested(tensor)? {
                return Ok("(nested)".to_owned());
            }
            let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
            PyResult::Ok(format!("{shape:?}"))
        };
        let tensors = tensors_of(self.whole).unwrap_or_default();
        let shapes: Vec<_> = tensors.iter().flat_map(shape).collect();
        let shapes = if shapes.is_empty() {
            format!("no tensor, but {}", type_name(self.whole))
        } else {
            format!("tensors of shape {}", shapes.join(", "))
        };
        let positioned = self.batch.positioned();
        let reads = |entry: &&Arc<Entry<Hook>>| {
            of_hook(py, entry.hook()).is_none_or(|it| it.reads(positioned))
        };
        let reader = entries.iter().find(reads).unwrap_or(&entries[0]);
        let (rows, dim) = (self.layout.size, self.layout.dim);
        let message = format!(
            "{}: the {rows} rows of the batch were not found in dimension {dim} of any tensor; \
             the module has {shapes}. Pass `gathered` to say which rows these are, or `size` to \
             say how many the batch has",
            (self.describe)(reader)
        );
        rows_error(py, message)
    }

    /// Begins to narrow tensors for the hooks of a member.
    pub fn begin(
        &mut self,
        member: usize,
        entries: &'a [Arc<Entry<Hook>>],
        needs: &Needs,
    ) -> PyResult<Narrowed<'a, 'py>> {
        let rows = self.layout.rows(self.batch.all(), member);
        // Another member's write bumps the version of a capture without a copy, and of a tensor that
        // autograd saved, though it hits other rows. A hook after such captures gets copies itself.
        let kept = if self.batch.runs_python() {
            needs.keeps
        } else {
            needs.python
        };
        let paired = self.stand_ins.is_some_and(|it| it.has_pairs(member));
        let copies = rows.copies() || kept || (needs.python && (self.grad || paired));
        if copies && needs.python && self.shared.is_none() {
            let both = [Some(self.whole), self.beside].into_iter().flatten();
            self.shared = Some(SharedMemory::among(
                both,
                self.layout,
                self.other,
                self.grad,
            )?);
        }
        Ok(Narrowed {
            member,
            rows,
            copies,
            python: needs.python,
            given: Vec::new(),
            blocks: Vec::new(),
            trail: Trail {
                first: &entries[0],
                returned: Vec::new(),
                wrote: None,
                versions: 0,
            },
        })
    }

    /// Narrows a structure's tensors to the rows of a member.
    pub fn narrow(
        &mut self,
        narrowed: &mut Narrowed<'a, 'py>,
        structure: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        map_tensors(structure, &mut |tensor| {
            if let Some(given) = narrowed.of_whole(tensor) {
                return Ok(given.tensor.clone());
            }
            let given = self.given(narrowed, tensor)?;
            narrowed.trail.versions += given.version.unwrap_or_default();
            let tensor = given.tensor.clone();
            narrowed.given.push(given);
            Ok(tensor)
        })
    }

    /// Returns a copy of a tensor that all rows share: a member that writes to it changes it for no other.
    fn lend(&mut self, whole: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(at) = self.lent.iter().position(|lent| lent.whole.is(whole)) {
            let lent = &self.lent[at];
            if lent.version.is_some() && version_if_any(&lent.copy)? == lent.version {
                return Ok(lent.copy.clone());
            }
            self.lent.swap_remove(at);
        }
        let copy = whole.call_method0(intern!(whole.py(), "clone"))?;
        self.lent.push(Lent {
            whole: whole.clone(),
            copy: copy.clone(),
            version: version_if_any(&copy)?,
        });
        Ok(copy)
    }

    fn given(
        &mut self,
        narrowed: &mut Narrowed<'a, 'py>,
        whole: &Bound<'py, PyAny>,
    ) -> PyResult<Given<'py>> {
        let (rows, dim) = (narrowed.rows, self.layout.dim);
        let has_rows = self.layout.covers(whole)?;
        // Rows of a subclass need not be a view.
        let copied = has_rows && (narrowed.copies || !Facts::is_plain(whole)?);
        let tensor = match (&self.shared, has_rows) {
            (_, false) if narrowed.python => self.lend(whole)?,
            (_, false) => whole.clone(),
            (Some(shared), _) if narrowed.copies => {
                shared.copy(&mut narrowed.blocks, whole, rows, dim)?
            }
            _ if copied => rows.copy(whole, dim)?,
            _ => rows.narrow(whole, dim)?,
        };
        let version = if narrowed.python && (copied || !has_rows) {
            version_if_any(&tensor)?
        } else {
            None
        };
        Ok(Given {
            whole: whole.clone(),
            tensor,
            narrowed: has_rows,
            copied,
            version,
        })
    }

    /// Collects the rows that a member changed: returned ones, and copies that it wrote to in place.
    pub fn take(
        &mut self,
        narrowed: &Narrowed<'a, 'py>,
        result: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let mut changed = match self.returned(narrowed, result) {
            Ok(changed) => changed,
            Err(message) => {
                // The hook from whose result on all are wrong.
                let mut results = narrowed.trail.returned.iter().rev();
                let mut guilty = None;
                for (hook, result) in results.by_ref() {
                    if guilty.is_some() && self.returned(narrowed, result).is_ok() {
                        break;
                    }
                    guilty = Some(*hook);
                }
                return Err(self.error(guilty.unwrap_or(narrowed.trail.first), &message?));
            }
        };
        if narrowed.python {
            self.take_written(narrowed, &mut changed)?;
        }
        self.changes.resize_with(changed.len(), Vec::new);
        for (of_tensor, rows) in self.changes.iter_mut().zip(changed) {
            let last = narrowed.trail.returned.last().map(|(hook, _)| *hook);
            let hook = last.unwrap_or(narrowed.wrote());
            of_tensor.extend(rows.map(|rows| Changed {
                member: narrowed.member,
                hook,
                whole: narrowed.whole_of(&rows),
                rows,
            }));
        }
        Ok(())
    }

    fn error(&self, hook: &Entry<Hook>, message: &str) -> PyErr {
        rows_error(
            self.whole.py(),
            format!("{}: it {message}", (self.describe)(hook)),
        )
    }

    /// Compares a hook's result with its input: for each tensor of the value the new rows, or None if
    /// they are the input itself. The error says how the result is malformed.
    fn returned(
        &self,
        narrowed: &Narrowed<'a, 'py>,
        result: &Bound<'py, PyAny>,
    ) -> Result<Vec<Option<Bound<'py, PyAny>>>, PyResult<String>> {
        let (mut changed, mut wrong) = (Vec::new(), None);
        let same = for_each_pair(self.whole, result, &mut |whole, new| {
            let Some(given) = narrowed.of_whole(whole) else {
                return Ok(());
            };
            let same = new.is(&given.tensor) || (!given.narrowed && new.is(whole));
            if !same && !given.narrowed {
                wrong.get_or_insert("replaces a tensor that has no rows of the batch".to_owned());
            } else if !same && let Some(differs) = difference(&given.tensor, new)? {
                wrong.get_or_insert(differs);
            }
            changed.push((!same).then(|| new.clone()));
            Ok(())
        });
        let expected = || Ok(tensors_of(self.whole)?.len());
        match (same, wrong) {
            (Err(error), _) => Err(Err(error)),
            (Ok(_), Some(wrong)) => Err(Ok(wrong)),
            (Ok(true), None) if expected().map_err(Err)? == changed.len() => Ok(changed),
            (Ok(_), None) => Err(Ok(
                "returns a different structure than it got, or changes a part that all rows share"
                    .to_owned(),
            )),
        }
    }

    /// A member wrote to copies of its rows: writes them where it would have written without a batch;
    /// or has a tensor replaced that no other code can see yet. `changed`: rows of each tensor of the
    /// value; none for the arguments of a call whose output was taken already.
    pub fn take_written(
        &self,
        narrowed: &Narrowed<'a, 'py>,
        changed: &mut [Option<Bound<'py, PyAny>>],
    ) -> PyResult<()> {
        let wrote = narrowed.wrote();
        let mut written = Vec::new();
        for given in &narrowed.given {
            // A view is written in the tensor of the batch itself.
            if given.narrowed && !given.copied {
                if let Some(stand_ins) = self.stand_ins {
                    stand_ins.touch(&given.whole);
                }
                continue;
            }
            if !given.written()? {
                continue;
            }
            if !given.narrowed {
                return Err(self.error(
                    wrote,
                    "writes in place to a tensor that has no rows of the batch",
                ));
            }
            // Where one of several with its memory is expanded, another was written, or none.
            let shared = self.shared.as_ref();
            let expanded = is_expanded(&given.whole)?;
            if !expanded || shared.is_none_or(|it| it.is_lone(&given.whole)) {
                written.push((given, expanded));
            }
        }
        for (given, expanded) in written {
            let apart = self
                .shared
                .as_ref()
                .is_some_and(|it| it.apart(&given.whole));
            let paired = |it: &StandIns| it.is_paired(&given.whole, narrowed.member);
            let apart = apart || self.stand_ins.is_some_and(paired);
            if apart && given.version.is_none() && self.is_same(given, narrowed)? {
                continue;
            }
            if apart {
                return Err(self.error(
                    wrote,
                    "writes in place to a tensor that shares memory with another, which copies of \
                     rows cannot reproduce: return the new value",
                ));
            }
            let mut replaced = !self.batch.runs_python();
            if !replaced && (self.grad || expanded) {
                replaced = self.beside.is_some() && self.is_fresh(&given.whole)?;
            }
            if !replaced {
                self.write_back(given, narrowed, wrote)?;
                continue;
            }
            let mut found = false;
            for (tensor, changed) in tensors_of(self.whole)?.iter().zip(&mut *changed) {
                if tensor.is(&given.whole) {
                    found = true;
                    changed.get_or_insert_with(|| given.tensor.clone());
                }
            }
            if !found {
                return Err(self.error(
                    wrote,
                    "writes in place to the module's input, but was registered after the batch \
                     was entered: register it before",
                ));
            }
        }
        Ok(())
    }

    /// True if a copy of rows equals them.
    fn is_same(&self, given: &Given<'py>, narrowed: &Narrowed<'a, 'py>) -> PyResult<bool> {
        let rows = narrowed.rows.narrow(&given.whole, self.layout.dim)?;
        let same = rows.call_method1(intern!(rows.py(), "equal"), (&given.tensor,));
        same?.is_truthy()
    }

    /// True if a tensor of an output shares no memory with anything else that hooks get.
    fn is_fresh(&self, tensor: &Bound<'py, PyAny>) -> PyResult<bool> {
        let fresh = any_tensor(self.whole, &mut |each| Ok(each.is(tensor)))?;
        let shared = self.shared.as_ref();
        Ok(fresh && shared.is_none_or(|shared| shared.only_within(tensor)))
    }

    /// Writes rows in place to the tensor of the batch, as the member would outside of a batch.
    fn write_back(
        &self,
        given: &Given<'py>,
        narrowed: &Narrowed<'a, 'py>,
        wrote: &Entry<Hook>,
    ) -> PyResult<()> {
        let originals = self
            .stand_ins
            .map(|it| it.originals(&given.whole, narrowed.member));
        let originals = originals.unwrap_or_default();
        let wholes = || originals.iter().chain([&given.whole]);
        let saved = |tensor: &_| {
            let inside = |arguments| is_saved_between(arguments, self.whole, tensor);
            Ok::<_, PyErr>(is_saved(tensor)? || self.beside.map_or(Ok(false), inside)?)
        };
        for whole in wholes() {
            if self.grad && saved(whole)? {
                return Err(self.error(
                    wrote,
                    "writes in place to a tensor that autograd has saved for its backward: return \
                     the new value",
                ));
            }
        }
        for whole in wholes() {
            let written = narrowed.rows.write(whole, self.layout.dim, &given.tensor);
            written.inspect_err(|error| self.note(wrote, error))?;
            if let Some(stand_ins) = self.stand_ins {
                stand_ins.note_written(whole)?;
            }
        }
        Ok(())
    }

    /// Adds to an error which hook it is of.
    fn note(&self, hook: &Entry<Hook>, error: &PyErr) {
        annotate(self.whole.py(), error, &(self.describe)(hook));
    }

    /// Returns the value with the changed rows; None if there are none. Makes one copy of each
    /// changed tensor. If rows cannot be written, only their member fails.
    pub fn merged(&mut self) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.whole.py();
        while self.changes.iter().any(|changes| !changes.is_empty()) {
            let mut writing = None;
            match self.written(&mut writing) {
                Ok(merged) => return Ok(Some(merged)),
                Err(error) => {
                    let (member, hook) = writing.ok_or_else(|| error.clone_ref(py))?;
                    self.note(hook, &error);
                    self.batch.all()[member].fail_with(py, error)?;
                    for changes in &mut self.changes {
                        changes.retain(|changed| changed.member != member);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Adds the arguments that others stand for in a value merged from this one.
    pub fn add_stand_ins(
        &self,
        merged: &Bound<'py, PyAny>,
        stand_ins: &mut StandIns,
    ) -> PyResult<()> {
        let mut found = Vec::new();
        for_each_pair(self.whole, merged, &mut |was, now| {
            found.push((was.clone(), now.clone()));
            Ok(())
        })?;
        let nothing = Vec::new();
        let changes = |at: usize| self.changes.get(at).unwrap_or(&nothing);
        for (at, (was, now)) in found.iter().enumerate() {
            if !now.is(was) {
                let replaced = changes(at).iter().map(|it| it.member).collect();
                stand_ins.add(was, now, self.layout, replaced)?;
            }
        }
        let of_member = |member: usize, at: usize| {
            let mut own = changes(at).iter().filter(|it| it.member == member);
            let own = own.next().map(|it| it.whole.as_ref().unwrap_or(&it.rows));
            own.unwrap_or(&found[at].0).clone()
        };
        let now: Vec<_> = found.iter().map(|(_, now)| now).collect();
        stand_ins.add_pairs(&now, self.layout, of_member)
    }

    /// Writes the changed rows to copies; `writing`: the member whose rows are written.
    fn written(
        &self,
        writing: &mut Option<(usize, &'a Entry<Hook>)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut changes = self.changes.iter();
        // The same tensor with the same changes stays the same.
        let mut made: Vec<(Bound<'py, PyAny>, &[Changed<'a, 'py>], Bound<'py, PyAny>)> = Vec::new();
        map_tensors(self.whole, &mut |tensor| {
            let changes = changes.next().map_or(&[][..], Vec::as_slice);
            if changes.is_empty() {
                return Ok(tensor.clone());
            }
            let alike = |one: &[Changed<'a, 'py>]| {
                let mut pairs = one.iter().zip(changes);
                one.len() == changes.len() && pairs.all(|(one, other)| one.rows.is(&other.rows))
            };
            let found = made.iter().find(|(of, by, _)| of.is(tensor) && alike(by));
            if let Some((.., copy)) = found {
                return Ok(copy.clone());
            }
            let copy = tensor.call_method0(intern!(tensor.py(), "clone"))?;
            for changed in changes {
                *writing = Some((changed.member, changed.hook));
                let rows = self.layout.rows(self.batch.all(), changed.member);
                rows.write(&copy, self.layout.dim, &changed.rows)?;
            }
            *writing = None;
            made.push((tensor.clone(), changes, copy.clone()));
            Ok(copy)
        })
    }
}

/// Returns how a tensor cannot stand for another: by shape, dtype, device or layout.
fn difference<'py>(given: &Bound<'py, PyAny>, new: &Bound<'py, PyAny>) -> PyResult<Option<String>> {
    for name in ["shape", "dtype", "device", "layout"] {
        let (expected, got) = (given.getattr(name)?, new.getattr(name)?);
        if !expected.eq(&got)? {
            return Ok(Some(format!(
                "returns different rows than it got: a tensor of {name} {got} instead of {expected}"
            )));
        }
    }
    Ok(None)
}

/// True if one of the tensors of a value has the rows.
pub fn covered(value: &Bound<'_, PyAny>, layout: &Layout) -> PyResult<bool> {
    any_tensor(value, &mut |tensor| layout.covers(tensor))
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
            let in_batch = of_hook(py, hook);
            needs.reads |= in_batch.is_none_or(|it| it.reads(positioned));
            needs.python |= hook.runs_python(py);
            needs.keeps |= in_batch.is_some_and(InBatch::keeps);
        }
        needs
    }
}
