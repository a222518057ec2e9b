//! Batches as what stands around a phase of a call.

use std::sync::Arc;

use ferrohook_core::{Entry, Phase};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call::around::{Around, Between};
use crate::call::{Call, NextHook, Replaced};
use crate::contexts::current::{self, Frames};
use crate::contexts::frame::Frame;
use crate::contexts::log::PhaseRun;
use crate::contexts::owners::{Firing, Owned};
use crate::hooks::hook::Hook;
use crate::registry::Registry;
use crate::rows::batch::{BatchBase, Batches};
use crate::rows::calls::hooks::{FoundHooks, HooksOfMember, MemberHooks};
use crate::rows::calls::program::{MergingMember, Program};
use crate::rows::calls::run::ProgramRun;
use crate::rows::calls::stand_ins::StandIns;
use crate::rows::calls::value::{self, Needs, Value};
use crate::rows::layout::Layout;
use crate::rows::matrix::CallArguments;
use crate::rows::member::Member;
use crate::rows::places::Tokens;
use crate::torch::target::Target;
use crate::torch::tensors::for_each_pair;

impl Around for Batches {
    fn begin<'py>(
        &self,
        frame: &Bound<'py, Frame>,
        call: &Call<'_, 'py>,
        phase: Phase,
        whole: Option<&Firing<'py>>,
    ) -> PyResult<Option<Box<dyn Between<'py> + 'py>>> {
        let batch = frame.cast::<BatchBase>()?;
        if !batch.get().fires_at(call.registry.get().module()) {
            return Ok(None);
        }
        let recall = phase == Phase::Forward && whole.is_none_or(|it| it.entries().is_empty());
        let hooks = MemberHooks::begin(batch, call, phase, whole, recall)?;
        Ok(hooks.map(|hooks| Box::new(hooks) as _))
    }

    fn has_hooks(&self, frame: &Bound<'_, Frame>, module: u64, phases: &[Phase]) -> bool {
        let batch = frame.cast::<BatchBase>();
        batch.is_ok_and(|batch| batch.get().has_hooks(module, phases))
    }

    fn runs(&self, frame: &Bound<'_, Frame>) -> bool {
        let batch = frame.cast::<BatchBase>();
        batch.is_ok_and(|_| !frame.get().closed())
    }
}

impl<'py> Between<'py> for MemberHooks<'py> {
    fn is_empty(&self, gap: usize) -> bool {
        match &self.hooks {
            FoundHooks::Program(_) => false, // the phase has no other hooks: one gap
            FoundHooks::Each(_) => self.in_gap(gap).next().is_none(),
        }
    }

    fn forward_pre(
        &self,
        call: &mut Call<'_, 'py>,
        gap: usize,
        target: &Target<'_, 'py>,
    ) -> PyResult<()> {
        let (py, batch) = (call.module.py(), self.batch.get());
        call.write_back()?;
        let before = value::arguments(call)?;
        for (_, entries) in self.in_gap(gap) {
            // The guard of a plan is present, so this is a call of the plan's model.
            if value::checks(py, &entries[..1]).is_some() {
                batch.set_size(&before)?;
            }
        }
        let layout = &layout_of(batch, call, &before, None)?.0;
        let lone = match call.args.get_item(0) {
            Ok(only) if call.args.len() == 1 => value::covered(&only, layout)?,
            _ => false,
        };
        let members = self.members(call, layout);
        let (program, others) = members.split(self.in_gap(gap), Phase::ForwardPre, lone)?;
        let mut stand_ins = StandIns::of(&self.batch);
        let replaced = members.forward_pre_of_each(others, target, &mut stand_ins)?;
        stand_ins.keep(call);
        call.replace_input(replaced);
        if program.members.is_empty() {
            return Ok(());
        }
        let mut stand_ins = StandIns::of(&self.batch);
        let mut numbers = Vec::new();
        let value = call.args.get_item(0)?;
        let members = self.members(call, layout);
        let replaced = match members.run_program(&program, &value, Some(&mut numbers))? {
            Ok(Some(changed)) => {
                for_each_pair(&value, &changed, &mut |was, now| {
                    if now.is(was) {
                        return Ok(());
                    }
                    stand_ins.add(was, now, layout, numbers.clone())
                })?;
                Some((PyTuple::new(py, [changed])?, None))
            }
            Ok(None) => None,
            Err(_each_alone) => {
                members.forward_pre_of_each(program.each(), target, &mut stand_ins)?
            }
        };
        stand_ins.keep(call);
        call.replace_input(replaced);
        Ok(())
    }

    #[cold]
    fn forward(
        &self,
        call: &mut Call<'_, 'py>,
        gap: usize,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let batch = self.batch.get();
        call.write_back()?;
        let (layout, covered) = if let Some(value) = output {
            layout_of(batch, call, value, output)?
        } else {
            let kwargs = call.kwargs.as_ref();
            (batch.layout(call.module, &call.args, kwargs, None)?, false)
        };
        let layout = &layout;
        let members = self.members(call, layout);
        if let FoundHooks::Program(program) = &self.hooks {
            if let Some(output) = output.filter(|_| covered && layout.is_of_batch()) {
                return members.forward_program(program, output);
            }
            return match self.each(call)? {
                Some(each) => each.forward(call, gap, output),
                None => Ok(None),
            };
        }
        let Some(output) = output else {
            return members.run_always_called(self.in_gap(gap)).map(|()| None);
        };
        let (program, others) = members.split(self.in_gap(gap), Phase::Forward, covered)?;
        let cacheable = self.alone && others.is_empty() && program.cacheable && !self.repeats();
        let changed = members.forward_of_each(others, output)?;
        if program.members.is_empty() {
            return Ok(changed);
        }
        let now = changed.as_ref().unwrap_or(output);
        let program = Arc::new(program);
        let more = members.forward_program(&program, now)?;
        if cacheable {
            batch.cache_program(layout, call.registry.get().module(), self.epoch, program);
        }
        Ok(more.or(changed))
    }
}

/// Runs the forward hooks of a batch's members at a module on an output, outside of a call of it. None
/// if they do not change it.
pub fn forward_of_members<'py>(
    batch: &Bound<'py, BatchBase>,
    module: &Bound<'py, PyAny>,
    registry: &Bound<'py, Registry>,
    output: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let none = PyTuple::empty(batch.py());
    let mut call = Call {
        module,
        registry,
        frames: Frames::fixed(none.clone()),
        args: none,
        kwargs: None,
        took: None,
        part: None,
        kept: None,
        after_pre_hooks: false,
    };
    let hooks = MemberHooks::begin(batch, &call, Phase::Forward, None, true)?;
    hooks.map_or(Ok(None), |it| it.forward(&mut call, 0, Some(output)))
}

/// Finds the rows of a value of a call, and whether it has them.
fn layout_of<'py>(
    batch: &BatchBase,
    call: &Call<'_, 'py>,
    value: &Bound<'py, PyAny>,
    output: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Layout, bool)> {
    let (args, kwargs) = (&call.args, call.kwargs.as_ref());
    let layout = batch.layout(call.module, args, kwargs, output)?;
    let covered = value::covered(value, &layout)?;
    let arguments = CallArguments { args, kwargs };
    let matrices = batch.matrices(&layout, value, arguments, covered)?;
    Ok(matrices.map_or((layout, covered), |layout| (layout, true)))
}

impl<'py> MemberHooks<'py> {
    /// The phase of a call, at a value with this layout.
    fn members<'a, 'c>(
        &'a self,
        call: &'a Call<'c, 'py>,
        layout: &'a Layout,
    ) -> Members<'a, 'c, 'py> {
        Members {
            call,
            frame: &self.batch,
            batch: self.batch.get(),
            layout,
            run: self.run.as_deref(),
        }
    }
}

/// One phase of a call, for the hooks of members.
struct Members<'a, 'c, 'py> {
    call: &'a Call<'c, 'py>,
    frame: &'a Bound<'py, BatchBase>,
    batch: &'a BatchBase,
    layout: &'a Layout,
    run: Option<&'a PhaseRun<'py>>,
}

impl<'a, 'py> Members<'a, '_, 'py> {
    /// Runs hooks of a member. If some are in Python, the current context has entered the member in
    /// place of the batch: modules that these call are called by its request alone.
    fn in_context<T>(
        &self,
        number: usize,
        python: bool,
        run: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        if !python {
            return run();
        }
        let member = self.member(number).frame.bind(self.py()).as_any();
        let frames = current::active(self.py())?;
        let frames = frames.iter_borrowed().map(|each| {
            if each.is(self.frame) {
                member.as_borrowed()
            } else {
                each
            }
        });
        let frames = PyTuple::new(self.py(), frames.collect::<Vec<_>>())?;
        let token = current::set(&frames)?;
        let result = run();
        current::reset(&token, "a hook of a batch ended in another context")?;
        result
    }

    /// Hooks of a member, its own.
    fn owned<'s>(
        &self,
        number: usize,
        entries: &'s [Arc<Entry<Hook>>],
    ) -> impl Iterator<Item = Owned<'s, 'py>>
    where
        'a: 's,
        'py: 's,
    {
        let owner = Some(self.batch.all()[number].frame.bind(self.py()));
        let run = self.run;
        entries.iter().map(move |entry| Owned { entry, owner, run })
    }

    /// Fails a member for the exception of its hooks.
    fn fail_with(&self, number: usize, error: PyErr) -> PyResult<()> {
        let member = self.member(number);
        if let Some(run) = self.run {
            run.note_failure(member.frame.get(), self.py(), &error);
        }
        member.fail_with(self.py(), error)
    }

    /// Raises, in a repeat, the error with which the member failed in the forward.
    fn fail_again(&self, number: usize) -> PyResult<()> {
        let frame = self.member(number).frame.get();
        let run = self.run;
        run.map_or(Ok(()), |run| run.fail_again(frame, self.py()))
    }

    fn py(&self) -> Python<'py> {
        self.call.module.py()
    }

    fn member(&self, number: usize) -> &'a Member {
        &self.batch.all()[number]
    }

    fn describe(&self, entry: &Entry<Hook>) -> String {
        self.call.site(entry).describe()
    }

    fn tokens(&self, number: usize) -> Tokens {
        self.batch.tokens_of(self.layout, number)
    }

    /// Makes the call as the hooks of a member see it.
    fn of_member<'t>(
        &'t self,
        number: usize,
        arguments: &Bound<'py, PyAny>,
        tokens: &'t Tokens,
    ) -> PyResult<Call<'t, 'py>> {
        value::note_run(self.member(number));
        let (args, kwargs) = arguments.extract::<(Bound<'py, PyTuple>, Bound<'py, PyDict>)>()?;
        Ok(Call {
            module: self.call.module,
            registry: self.call.registry,
            frames: Frames::fixed(PyTuple::empty(self.py())),
            args,
            kwargs: self.call.kwargs.is_some().then_some(kwargs),
            took: self.call.took,
            part: Some(tokens),
            kept: None,
            after_pre_hooks: false,
        })
    }

    /// Splits members with rows into those whose hooks merge, if the value has the rows, and the
    /// others.
    fn split<'s>(
        &self,
        hooks: impl Iterator<Item = HooksOfMember<'s>>,
        phase: Phase,
        covered: bool,
    ) -> PyResult<(Program, Vec<HooksOfMember<'s>>)> {
        let (mut merging, mut others) = (Vec::new(), Vec::new());
        for (number, entries) in hooks {
            if self.layout.rows(self.batch.all(), number).len() == 0 {
                value::note_run(self.member(number));
                continue;
            }
            let member = if covered {
                MergingMember::of(self.py(), phase, self.batch, number, entries)?
            } else {
                None
            };
            match member {
                Some(member) => merging.push(member),
                None => others.push((number, entries)),
            }
        }
        Ok((Program::new(merging), others))
    }

    /// Runs the hooks of members that merge; an inner error means that each member's hooks have to
    /// run separately.
    fn run_program(
        &self,
        program: &Program,
        value: &Bound<'py, PyAny>,
        replaced: Option<&mut Vec<usize>>,
    ) -> PyResult<PyResult<Option<Bound<'py, PyAny>>>> {
        let run = ProgramRun {
            program,
            batch: self.batch,
            layout: self.layout,
            run: self.run,
            describe: &|entry| self.describe(entry),
        };
        let mut fail = |number: usize, entry: &Entry<Hook>, error| {
            let member = self.member(number);
            let owner = Some(member.frame.bind(self.py()));
            let run = self.run;
            match self.call.apply_on_error(Owned { entry, owner, run }, error) {
                Ok(()) => Ok(true),
                Err(error) => member.fail_with(self.py(), error).map(|()| false),
            }
        };
        run.run(value, &mut fail, replaced)
    }

    /// Runs forward hooks of members that merge, on an output that has the rows.
    fn forward_program(
        &self,
        program: &Program,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.run_program(program, output, None)? {
            Ok(changed) => Ok(changed),
            Err(_each_alone) => self.forward_of_each(program.each(), output),
        }
    }

    /// Runs forward hooks with `always_call`, after an exception.
    fn run_always_called<'s>(
        &self,
        hooks: impl Iterator<Item = HooksOfMember<'s>>,
    ) -> PyResult<()> {
        let arguments = value::arguments(self.call)?;
        let describe = |entry: &Entry<Hook>| self.describe(entry);
        let mut value = Value::new(&arguments, None, self.layout, self.batch, &describe)?;
        let covered = value::covered(&arguments, self.layout)?;
        for (number, entries) in hooks {
            let tokens = self.tokens(number);
            let mut own = arguments.clone();
            if covered {
                let needs = Needs::of(self.py(), entries, self.batch.positioned());
                let mut narrowed = value.begin(number, entries, &needs)?;
                own = value.narrow(&mut narrowed, &arguments)?;
            }
            let mut call = self.of_member(number, &own, &tokens)?;
            let hooks = self.owned(number, entries);
            self.in_context(number, true, || {
                call.run_always_called(&mut hooks.map(NextHook::Own), None);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Runs the pre-hooks of each member separately, on the call's arguments narrowed to its rows. Returns
    /// new arguments, and adds the arguments that they stand for.
    fn forward_pre_of_each(
        &self,
        members: Vec<HooksOfMember<'_>>,
        target: &Target<'_, 'py>,
        stand_ins: &mut StandIns,
    ) -> PyResult<Option<Replaced<'py>>> {
        if members.is_empty() {
            return Ok(None);
        }
        let py = self.py();
        let before = value::arguments(self.call)?;
        let describe = |entry: &Entry<Hook>| self.describe(entry);
        let mut value = Value::new(&before, None, self.layout, self.batch, &describe)?;
        value.stand_ins = StandIns::of_call(self.call);
        let covered = value::covered(&before, self.layout)?;
        let mut checked = None;
        for (number, entries) in members {
            let member = self.member(number);
            let tokens = self.tokens(number);
            let mut run = || {
                let needs = Needs::of(py, entries, self.batch.positioned());
                if !needs.reads {
                    let checks = value::checks(py, entries);
                    if checks.is_some() && checks == checked {
                        value::note_run(member);
                        return Ok(());
                    }
                    let mut call = self.of_member(number, &before, &tokens)?;
                    call.forward_pre(self.owned(number, entries), target)?;
                    checked = checks;
                    return Ok(());
                }
                if !covered {
                    return Err(value.not_covered(entries));
                }
                let mut narrowed = value.begin(number, entries, &needs)?;
                let own = value.narrow(&mut narrowed, &before)?;
                let mut call = self.of_member(number, &own, &tokens)?;
                let hooks = self.owned(number, entries);
                self.in_context(number, needs.python, || {
                    call.forward_pre_seen(hooks, target, |hook, call, replaced| {
                        let arguments = replaced.then(|| value::arguments(call)).transpose()?;
                        narrowed.note(hook.entry, arguments)
                    })
                })?;
                let after = value::arguments(&call)?;
                self.fail_again(number)?;
                value.take(&narrowed, &after)
            };
            if let Err(error) = run() {
                self.fail_with(number, error)?;
            }
        }
        let Some(merged) = value.merged()? else {
            return Ok(None);
        };
        value.add_stand_ins(&merged, stand_ins)?;
        let (args, kwargs) = merged.extract::<(Bound<'py, PyTuple>, Bound<'py, PyDict>)>()?;
        Ok(Some((args, self.call.kwargs.is_some().then_some(kwargs))))
    }

    /// Runs the forward hooks of each member separately, on tensors narrowed to its rows. Returns the
    /// replaced output.
    fn forward_of_each(
        &self,
        members: Vec<HooksOfMember<'_>>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if members.is_empty() {
            return Ok(None);
        }
        let py = self.py();
        let before = value::arguments(self.call)?;
        // A router takes tokens of (batch, length, ...), and returns them as the rows of a matrix.
        let of_inputs = if self.layout.has_matrices() {
            Some(layout_of(self.batch, self.call, &before, None)?.0)
        } else {
            None
        };
        let of_inputs = of_inputs.as_ref().filter(|layout| !layout.has_matrices());
        let describe = |entry: &Entry<Hook>| self.describe(entry);
        let beside = Some(&before);
        let value = Value::new(output, beside, self.layout, self.batch, &describe)?;
        let mut value = value.with(of_inputs);
        value.stand_ins = StandIns::of_call(self.call);
        let covered = value::covered(output, self.layout)?;
        for (number, entries) in members {
            let tokens = self.tokens(number);
            let hooks = self.owned(number, entries).map(NextHook::Own);
            let run = || {
                let needs = Needs::of(py, entries, self.batch.positioned());
                if !needs.reads {
                    let mut call = self.of_member(number, &before, &tokens)?;
                    return call.forward(hooks, output.clone()).map(drop);
                }
                if !covered {
                    return Err(value.not_covered(entries));
                }
                let mut narrowed = value.begin(number, entries, &needs)?;
                let own = value.narrow(&mut narrowed, output)?;
                let mut inputs = None;
                let arguments = match of_inputs {
                    _ if !needs.python => before.clone(),
                    None => value.narrow(&mut narrowed, &before)?,
                    Some(layout) => {
                        let value = Value::new(output, beside, layout, self.batch, &describe)?;
                        let mut value = value.with(Some(self.layout));
                        value.stand_ins = StandIns::of_call(self.call);
                        let mut narrowed = value.begin(number, entries, &needs)?;
                        let arguments = value.narrow(&mut narrowed, &before)?;
                        inputs = Some((value, narrowed));
                        arguments
                    }
                };
                let mut call = self.of_member(number, &arguments, &tokens)?;
                let mut noted = Ok(());
                let result = self.in_context(number, needs.python, || {
                    call.forward_seen(hooks, own, |next, returned| {
                        if let (NextHook::Own(hook), Ok(())) = (next, &noted) {
                            noted = narrowed.note(hook.entry, returned.cloned());
                            if let (Some((_, narrowed)), Ok(())) = (&mut inputs, &noted) {
                                noted = narrowed.note(hook.entry, None);
                            }
                        }
                    })
                })?;
                noted?;
                self.fail_again(number)?;
                if let Some((value, narrowed)) = &inputs {
                    value.take_written(narrowed, &mut [])?;
                }
                value.take(&narrowed, &result)
            };
            if let Err(error) = run() {
                self.fail_with(number, error)?;
            }
        }
        value.merged()
    }
}
