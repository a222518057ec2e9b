//! Part of a call that runs the hooks of a batch's members.

use std::sync::Arc;

use ferrohook_core::{Entry, Phase};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call::rows::{self, Hooks, MemberHooks, Needs, Segment, Value};
use crate::call::stages::Stages;
use crate::call::{Call, Step};
use crate::contexts::batch::{BatchBase, Layout};
use crate::contexts::current::Frames;
use crate::contexts::frame::Frame;
use crate::contexts::owners::{Firing, Owned};
use crate::hooks::hook::Hook;
use crate::hooks::members::{MergedHooks, Simple};
use crate::torch::hooks::TorchHook;
use crate::torch::rows::Tokens;
use crate::torch::target::Target;

/// Steps of a phase in a batch whose members have hooks.
pub fn steps_with_rows<'s, 'py>(
    torch_hooks: &'s [TorchHook<'py>],
    snapshot: Option<&'s Firing<'py>>,
    segments: &'s [Segment<'s, 'py>],
) -> Vec<Step<'s, 'py>> {
    let mut own = snapshot.into_iter().flat_map(Firing::iter).map(Step::Own);
    let mut steps: Vec<_> = torch_hooks.iter().map(Step::Torch).collect();
    for segment in segments {
        if !segment.is_empty() {
            steps.push(Step::Rows(segment));
        }
        steps.extend(own.next());
    }
    steps
}

/// Hooks of a member.
fn owned<'s, 'py: 's>(
    entries: &'s [Arc<Entry<Hook>>],
    member: &'s Bound<'py, Frame>,
) -> impl Iterator<Item = Owned<'s, 'py>> {
    let owner = Some(member);
    entries.iter().map(move |entry| Owned { entry, owner })
}

impl<'py> Call<'_, 'py> {
    /// Takes the hooks of a phase of the batch's members; None if there are none. `recall`: those
    /// that are remembered as they merge, if there are.
    pub(super) fn begin_rows(
        &self,
        phase: Phase,
        recall: bool,
    ) -> PyResult<Option<MemberHooks<'py>>> {
        let (py, registry) = (self.module.py(), self.registry.get());
        if !registry.work().watched(phase) {
            return Ok(None);
        }
        match self.frames.entered(py)? {
            Some(frames) => Ok({
                let module = self.module;
                MemberHooks::begin(module, registry, phase, frames, recall)
            }),
            None => Ok(None),
        }
    }

    #[cold]
    pub(super) fn forward_pre_in_batch(
        &mut self,
        members: &MemberHooks<'py>,
        snapshot: Option<&Firing<'py>>,
        target: &Target<'_, 'py>,
    ) -> PyResult<()> {
        let segments = members.segments(snapshot);
        for step in steps_with_rows(&[], snapshot, &segments) {
            match step {
                Step::Torch(_) => {}
                Step::Own(entry) => self.forward_pre(std::iter::once(entry), target)?,
                Step::Rows(segment) => self.forward_pre_of_members(segment, target)?,
            }
        }
        Ok(())
    }

    /// Makes the call as the hooks of a member see it.
    fn of_member(
        &self,
        batch: &BatchBase,
        member: usize,
        arguments: &Bound<'py, PyAny>,
        layout: &Layout,
    ) -> PyResult<Self> {
        let py = self.module.py();
        let tokens = Tokens {
            positions: batch.positions_of(layout, member),
            own: layout.own_rows(member).cloned(),
        };
        let member = &batch.all()[member];
        rows::note_run(member);
        let (args, kwargs) = arguments.extract::<(Bound<'py, PyTuple>, Bound<'py, PyDict>)>()?;
        Ok(Self {
            module: self.module,
            registry: self.registry,
            frames: Frames::fixed(PyTuple::empty(py)),
            args,
            kwargs: self.kwargs.is_some().then_some(kwargs),
            took: self.took,
            tokens,
        })
    }

    fn forward_pre_of_members(
        &mut self,
        segment: &Segment<'_, 'py>,
        target: &Target<'_, 'py>,
    ) -> PyResult<()> {
        let py = self.module.py();
        let batch = segment.batch.get();
        let before = rows::arguments(&self.args, self.kwargs.as_ref())?;
        for (_, entries) in segment.members() {
            // The guard of a plan: the call is that of its model.
            if rows::checks(py, &entries[..1])?.is_some() {
                batch.set_size(&before)?;
            }
        }
        let layout = batch.layout(self.module, &self.args, self.kwargs.as_ref(), None)?;
        let only = match self.args.get_item(0) {
            Ok(only) if self.args.len() == 1 => Value::new(&only, &layout, batch).covered()?,
            _ => false,
        };
        let (merged, others) = Self::split(py, segment, Phase::ForwardPre, &layout, only)?;
        self.forward_pre_of_each(segment, others, &layout, target)?;
        if merged.members.is_empty() {
            return Ok(());
        }
        let value = self.args.get_item(0)?;
        match self.run_merged(batch, &merged, &layout, &value)? {
            Ok(Some(changed)) => self.args = PyTuple::new(py, [changed])?,
            Ok(None) => {}
            Err(_each_alone) => {
                self.forward_pre_of_each(segment, merged.each(), &layout, target)?;
            }
        }
        Ok(())
    }

    /// Runs the pre-hooks of each member alone, on the call's arguments narrowed to its rows.
    fn forward_pre_of_each(
        &mut self,
        segment: &Segment<'_, 'py>,
        members: Vec<Hooks<'_>>,
        layout: &Layout,
        target: &Target<'_, 'py>,
    ) -> PyResult<()> {
        if members.is_empty() {
            return Ok(());
        }
        let py = self.module.py();
        let batch = segment.batch.get();
        let before = rows::arguments(&self.args, self.kwargs.as_ref())?;
        let mut value = Value::new(&before, layout, batch);
        let covered = value.covered()?;
        let mut checked = None;
        for (number, entries) in members {
            let frame = batch.all()[number].frame.bind(py);
            let mut run = || {
                let needs = Needs::of(py, entries, batch.positioned())?;
                let describe = || self.site(&entries[0]).describe();
                if !needs.reads {
                    let checks = rows::checks(py, entries)?;
                    if checks.is_some() && checks == checked {
                        rows::note_run(&batch.all()[number]);
                        return Ok(());
                    }
                    let mut call = self.of_member(batch, number, &before, layout)?;
                    call.forward_pre(owned(entries, frame), target)?;
                    checked = checks;
                    return Ok(());
                }
                if !covered {
                    return Err(value.not_covered(&describe()));
                }
                let narrowed = value.narrow(number, &needs)?;
                let mut call = self.of_member(batch, number, &narrowed.value, layout)?;
                call.forward_pre(owned(entries, frame), target)?;
                let after = rows::arguments(&call.args, call.kwargs.as_ref())?;
                value.take(number, &narrowed, &after, needs.python, &describe())
            };
            if let Err(error) = run() {
                rows::settle(py, &batch.all()[number], error)?;
            }
        }
        if let Some(merged) = value.merged()? {
            let (args, kwargs) = merged.extract::<(Bound<'py, PyTuple>, Bound<'py, PyDict>)>()?;
            let kwargs = self.kwargs.is_some().then_some(kwargs);
            self.replace_input(Some((args, kwargs)));
        }
        Ok(())
    }

    /// Splits members with rows into those whose hooks merge, if the value has the rows, and the
    /// others.
    fn split<'s>(
        py: Python<'py>,
        segment: &Segment<'s, 'py>,
        phase: Phase,
        layout: &Layout,
        covered: bool,
    ) -> PyResult<(MergedHooks, Vec<Hooks<'s>>)> {
        let batch = segment.batch.get();
        let (mut simple, mut others) = (Vec::new(), Vec::new());
        for (number, entries) in segment.members() {
            if layout.rows(batch, number).len() == 0 {
                rows::note_run(&batch.all()[number]);
                continue;
            }
            let merging = if covered {
                Simple::of(py, phase, batch, number, entries)?
            } else {
                None
            };
            match merging {
                Some(merging) => simple.push(merging),
                None => others.push((number, entries)),
            }
        }
        Ok((MergedHooks::new(simple), others))
    }

    /// Runs the hooks of members that merge.
    fn run_merged(
        &self,
        batch: &BatchBase,
        hooks: &MergedHooks,
        layout: &Layout,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<PyResult<Option<Bound<'py, PyAny>>>> {
        let py = self.module.py();
        let stages = Stages {
            hooks,
            batch,
            layout,
            describe: &|entry| self.site(entry).describe(),
        };
        let mut fail = |number: usize, entry: &Entry<Hook>, error| {
            let arguments = rows::arguments(&self.args, self.kwargs.as_ref())?;
            let call = self.of_member(batch, number, &arguments, layout)?;
            let owner = Some(batch.all()[number].frame.bind(py));
            match call.apply_on_error(Owned { entry, owner }, error) {
                Ok(()) => Ok(true),
                Err(error) => rows::settle(py, &batch.all()[number], error).map(|()| false),
            }
        };
        stages.run(value, &mut fail)
    }

    /// Runs forward hooks of members that merge, on an output that has the rows.
    fn forward_merged(
        &self,
        batch: &BatchBase,
        hooks: &MergedHooks,
        layout: &Layout,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.run_merged(batch, hooks, layout, output)? {
            Ok(changed) => Ok(changed),
            Err(_each_alone) => self.forward_of_each(batch, hooks.each(), layout, output),
        }
    }

    /// Runs forward hooks of the members; `output` is None if the module did not return: those
    /// with `always_call` run then.
    #[cold]
    pub(super) fn forward_of_members(
        &mut self,
        segment: &Segment<'_, 'py>,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.module.py();
        let batch = segment.batch.get();
        let layout = batch.layout(self.module, &self.args, self.kwargs.as_ref(), output)?;
        let covered = match output {
            Some(output) => Value::new(output, &layout, batch).covered()?,
            None => false,
        };
        if let Some(merged) = &segment.merged {
            if let Some(output) = output.filter(|_| covered) {
                return self.forward_merged(batch, merged, &layout, output);
            }
            return match self.begin_rows(Phase::Forward, false)? {
                Some(members) => self.forward_of_members(&members.segments(None)[0], output),
                None => Ok(None),
            };
        }
        let Some(output) = output else {
            let before = rows::arguments(&self.args, self.kwargs.as_ref())?;
            for (number, entries) in segment.members() {
                let frame = batch.all()[number].frame.bind(py);
                let mut call = self.of_member(batch, number, &before, &layout)?;
                call.run_always_called(&mut owned(entries, frame).map(Step::Own), None);
            }
            return Ok(None);
        };
        let (merged, others) = Self::split(py, segment, Phase::Forward, &layout, covered)?;
        let remember = segment.all && others.is_empty() && merged.last;
        let changed = self.forward_of_each(batch, others, &layout, output)?;
        if merged.members.is_empty() {
            return Ok(changed);
        }
        let now = changed.as_ref().unwrap_or(output);
        let merged = Arc::new(merged);
        let more = self.forward_merged(batch, &merged, &layout, now)?;
        if remember {
            batch.remember(&layout, self.registry.get().module(), segment.epoch, merged);
        }
        Ok(more.or(changed))
    }

    /// Runs the hooks of each member alone, on tensors narrowed to its rows.
    fn forward_of_each(
        &self,
        batch: &BatchBase,
        members: Vec<Hooks<'_>>,
        layout: &Layout,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if members.is_empty() {
            return Ok(None);
        }
        let py = self.module.py();
        let before = rows::arguments(&self.args, self.kwargs.as_ref())?;
        let inputs = Value::new(&before, layout, batch);
        let mut value = Value::new(output, layout, batch);
        let covered = value.covered()?;
        for (number, entries) in members {
            let frame = batch.all()[number].frame.bind(py);
            let mut run = || {
                let needs = Needs::of(py, entries, batch.positioned())?;
                let describe = || self.site(&entries[0]).describe();
                if !needs.reads {
                    let mut call = self.of_member(batch, number, &before, layout)?;
                    let hooks = owned(entries, frame).map(Step::Own);
                    return call.forward(hooks, output.clone()).map(drop);
                }
                if !covered {
                    return Err(value.not_covered(&describe()));
                }
                let narrowed = value.narrow(number, &needs)?;
                let mut call = if needs.python {
                    let arguments = inputs.narrow(number, &needs)?.value;
                    self.of_member(batch, number, &arguments, layout)?
                } else {
                    self.of_member(batch, number, &before, layout)?
                };
                let result =
                    call.forward(owned(entries, frame).map(Step::Own), narrowed.value.clone())?;
                value.take(number, &narrowed, &result, needs.python, &describe())
            };
            if let Err(error) = run() {
                rows::settle(py, &batch.all()[number], error)?;
            }
        }
        value.merged()
    }
}
