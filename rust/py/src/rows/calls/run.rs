//! Runs of a program: hooks of many members at once.

use std::any::Any;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;

use ferrohook_core::{Entry, HookId, Inside, Phase};
use pyo3::intern;
use pyo3::prelude::*;

use crate::contexts::log::PhaseRun;
use crate::contexts::owners::Owned;
use crate::error::rows_error;
use crate::hooks::hook::Hook;
use crate::hooks::site::is_fault;
use crate::rows::batch::BatchBase;
use crate::rows::calls::merging::{
    Joints, MergedPart, MergedResult, Select, SharedValue, in_batch_of, of_hook,
};
use crate::rows::calls::program::{MergingMember, Program, StageHook};
use crate::rows::calls::value::note_run;
use crate::rows::layout::Layout;
use crate::rows::places::{TokenPlace, TokenPositions};
use crate::torch::tensors::{map_tensors, tensors_of};

impl MergingMember {
    /// Returns the merging hooks of a member; None if one of them runs for each member separately.
    pub fn of(
        py: Python<'_>,
        phase: Phase,
        batch: &BatchBase,
        number: usize,
        entries: &[Arc<Entry<Hook>>],
    ) -> PyResult<Option<Self>> {
        let owner = batch.all()[number].frame.bind(py).as_any();
        let mut hooks = VecDeque::with_capacity(entries.len());
        let mut keeps = false;
        for entry in entries {
            let hook = entry.hook();
            let Some(in_batch) = of_hook(py, hook) else {
                return Ok(None);
            };
            let Some(form) = in_batch.merges(hook.object().bind(py), phase, owner)? else {
                return Ok(None);
            };
            let merged = in_batch_of(form.hook.bind(py))?;
            if keeps && !merged.keeps() {
                return Ok(None);
            }
            keeps = merged.keeps();
            let class: &dyn Any = merged;
            let kind = (keeps, class.type_id());
            let hook = StageHook {
                member: number,
                entry: Arc::clone(entry),
                merging: form,
            };
            hooks.push_back((kind, hook));
        }
        Ok(Some(Self {
            number,
            entries: entries.into(),
            hooks,
        }))
    }
}

/// Run of a program in one call.
pub struct ProgramRun<'a, 'py> {
    pub program: &'a Program,
    pub batch: &'a BatchBase,
    pub layout: &'a Layout,
    pub run: Option<&'a PhaseRun<'py>>,
    /// Describes a hook, for errors.
    pub describe: &'a dyn Fn(&Entry<Hook>) -> String,
}

/// Takes the error of a hook of the member with a number. Returns true if the member goes on.
pub type Fail<'a> = dyn FnMut(usize, &Entry<Hook>, PyErr) -> PyResult<bool> + 'a;

/// Hooks of a program that a call leaves out.
#[derive(Default)]
struct LeftOut {
    /// Numbers of the members that failed.
    members: Vec<usize>,
    /// Hooks that failed, of members that go on.
    hooks: Vec<HookId>,
}

impl LeftOut {
    fn has(&self, hook: &StageHook) -> bool {
        self.members.contains(&hook.member) || self.hooks.contains(&hook.entry.id())
    }
}

impl<'a, 'py> ProgramRun<'a, 'py> {
    fn owned(&self, py: Python<'py>, hook: &'a StageHook) -> Owned<'a, 'py> {
        Owned {
            entry: &hook.entry,
            owner: Some(self.batch.all()[hook.member].frame.bind(py)),
            run: self.run,
        }
    }

    /// Returns the parts of some hooks.
    fn parts(
        &self,
        py: Python<'py>,
        hooks: &[&'a StageHook],
    ) -> PyResult<Vec<MergedPart<'a, 'py>>> {
        let mut parts = Vec::with_capacity(hooks.len());
        for hook in hooks {
            let (member, merging) = (hook.member, &hook.merging);
            let all = self.layout.rows(self.batch.all(), member);
            let rows = match self.places(hook) {
                None => Cow::Borrowed(all),
                Some(places) => Cow::Owned(all.at(&places).ok_or_else(|| {
                    rows_error(py, "the positions are for other rows than the member has")
                })?),
            };
            parts.push(MergedPart {
                hook: merging.hook.bind(py),
                key: (member, merging.at.as_ref().map(|(at, _)| *at)),
                rows,
            });
        }
        Ok(parts)
    }

    /// Places of a hook's tokens among its member's tokens; None if it is for all.
    fn places(&self, hook: &StageHook) -> Option<Vec<TokenPlace>> {
        let (_, of_batch) = hook.merging.at.as_ref()?;
        Some(self.layout.places(hook.member, of_batch))
    }

    /// True if a hook is for all tokens of its member, or for some.
    fn has_tokens(&self, hook: &StageHook) -> bool {
        self.places(hook).is_none_or(|places| !places.is_empty())
    }

    /// Returns the positions of a hook's tokens, if known.
    fn positions(&self, hook: &StageHook) -> Option<TokenPositions> {
        let of_member = self.batch.positions_of(self.layout, hook.member)?;
        match self.places(hook) {
            None => of_member.of_whole(),
            Some(places) => of_member.at(&places, self.layout.dim),
        }
    }

    /// Runs the hooks. Returns the changed value, None if nothing changed it; an inner error means
    /// that each member's hooks have to run separately. `replaced` gets the members whose rows changed.
    pub fn run(
        &self,
        value: &Bound<'py, PyAny>,
        fail: &mut Fail<'_>,
        mut replaced: Option<&mut Vec<usize>>,
    ) -> PyResult<PyResult<Option<Bound<'py, PyAny>>>> {
        let py = value.py();
        let inside = Inside::here();
        for (number, _) in &self.program.members {
            note_run(&self.batch.all()[*number]);
        }
        let mut left_out = LeftOut::default();
        if !self.program.checked(value)? {
            self.check(value, &inside, &mut left_out, fail)?;
        }
        let mut changed = None;
        for stage in &self.program.stages {
            // Loads that miss the caches overlap; the atomic additions that enter hooks do not.
            black_box(stage.hooks.iter().all(|hook| !hook.entry.removed()));
            let mut running = Vec::with_capacity(stage.hooks.len());
            let mut invocations = Vec::with_capacity(stage.hooks.len());
            for hook in &stage.hooks {
                if left_out.has(hook) {
                    continue;
                }
                let invocation = self.owned(py, hook).enter(&inside);
                if invocation.is_some() && self.has_tokens(hook) {
                    running.push(hook);
                }
                invocations.extend(invocation);
            }
            if running.is_empty() {
                continue;
            }
            let shared = SharedValue {
                value: changed.as_ref().unwrap_or(value),
                layout: self.layout,
                written: self.batch.runs_python(),
                owner: &|part| {
                    let frame = &self.batch.all()[running[part].member].frame;
                    frame.bind(py).clone().into_any()
                },
                tokens: &|part| self.batch.tokens_of(self.layout, running[part].member),
                positions: &|part| self.positions(running[part]),
                describe: &|part| (self.describe)(&running[part].entry),
            };
            let join = || self.join(py, &running);
            let joint = if running.len() == stage.hooks.len() {
                stage.joint(join)?
            } else {
                join()?
            };
            let mut merged = MergedResult::default();
            match joint.iter().try_for_each(|it| it.run(&shared, &mut merged)) {
                Ok(()) => {}
                Err(error) if is_fault(py, &error) => return Ok(Err(error)),
                Err(error) => return Err(error),
            }
            let is_new = merged.value.is_some();
            changed = merged.value.or(changed);
            for (number, error) in merged.failed {
                let hook = running[number];
                if !fail(hook.member, &hook.entry, error)? {
                    left_out.members.push(hook.member);
                    changed = match changed {
                        Some(now) => Some(self.restored(value, &now, hook.member)?),
                        None => None,
                    };
                }
            }
            if let (Some(replaced), true) = (&mut replaced, is_new) {
                replaced.extend(running.iter().map(|hook| hook.member));
            }
            // The innermost first, as they are left in order.
            while invocations.pop().is_some() {}
        }
        if let Some(replaced) = replaced {
            // The rows of one that failed are the module's own again.
            replaced.retain(|member| !left_out.members.contains(member));
        }
        Ok(Ok(changed))
    }

    /// Returns a changed value with a member's rows as they were: earlier stages changed them, and a
    /// later one failed.
    fn restored(
        &self,
        value: &Bound<'py, PyAny>,
        changed: &Bound<'py, PyAny>,
        member: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut before = tensors_of(value)?.into_iter();
        let rows = self.layout.rows(self.batch.all(), member);
        map_tensors(changed, &mut |now| match before.next() {
            Some(old) if !old.is(now) && self.layout.covers(&old)? => {
                let restored = now.call_method0(intern!(now.py(), "clone"))?;
                rows.write(
                    &restored,
                    self.layout.dim,
                    &rows.narrow(&old, self.layout.dim)?,
                )?;
                Ok(restored)
            }
            _ => Ok(now.clone()),
        })
    }

    fn join(&self, py: Python<'py>, hooks: &[&'a StageHook]) -> PyResult<Arc<Joints>> {
        let in_batch = in_batch_of(hooks[0].merging.hook.bind(py))?;
        // A repeat may have other positions than the batch has now.
        let repeats = self.run.is_some_and(|run| run.replay().is_some());
        let select = Select(if repeats {
            None
        } else {
            self.batch.selections(self.layout)
        });
        in_batch
            .join(&self.parts(py, hooks)?, &select)
            .map(Arc::new)
    }

    /// Checks all hooks before one runs: the rows of a member that fails stay as they are.
    fn check(
        &self,
        value: &Bound<'py, PyAny>,
        inside: &Inside,
        left_out: &mut LeftOut,
        fail: &mut Fail<'_>,
    ) -> PyResult<()> {
        let py = value.py();
        let mut fine = true;
        for stage in &self.program.stages {
            let concerned = |hook: &&StageHook| {
                !left_out.members.contains(&hook.member) && self.has_tokens(hook)
            };
            let concerned: Vec<_> = stage.hooks.iter().filter(concerned).collect();
            let Some(first) = concerned.first() else {
                continue;
            };
            let in_batch = in_batch_of(first.merging.hook.bind(py))?;
            let parts = self.parts(py, &concerned)?;
            let describe = |part: usize| (self.describe)(&concerned[part].entry);
            for (number, error) in in_batch.check_parts(&parts, value, &describe)? {
                fine = false;
                let hook = concerned[number];
                let _counted = self.owned(py, hook).enter(inside);
                if fail(hook.member, &hook.entry, error)? {
                    left_out.hooks.push(hook.entry.id());
                } else {
                    left_out.members.push(hook.member);
                }
            }
        }
        if fine && self.program.cacheable {
            self.program.check(value)?;
        }
        Ok(())
    }
}
