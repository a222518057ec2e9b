//! Hooks of a batch's members, run stage by stage for all members at once.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use ferrohook_core::{Entry, Inside, Phase};
use pyo3::prelude::*;

use crate::contexts::frame::Frame;
use crate::contexts::log::PhaseRun;
use crate::contexts::owners::Owned;
use crate::error::rows_error;
use crate::hooks::hook::Hook;
use crate::hooks::site::is_fault;
use crate::rows::batch::BatchBase;
use crate::rows::calls::merged::{HookAt, MergedHooks, Simple};
use crate::rows::calls::merging::{
    InBatch, Joint, MergedPart, Select, SharedValue, in_batch_of, of_hook,
};
use crate::rows::calls::value::note_run;
use crate::rows::layout::Layout;
use crate::rows::places::{TokenPlace, TokenPositions};

impl Simple {
    /// Returns the merging hooks of a member; None if one of them runs for each member alone.
    pub fn of(
        py: Python<'_>,
        phase: Phase,
        batch: &BatchBase,
        number: usize,
        entries: &[Arc<Entry<Hook>>],
    ) -> PyResult<Option<Self>> {
        let owner = batch.all()[number].frame.bind(py).as_any();
        let mut simple = Self {
            number,
            entries: entries.into(),
            merging: Vec::with_capacity(entries.len()),
            kinds: Vec::with_capacity(entries.len()),
        };
        let mut keeps = false;
        for entry in entries {
            let hook = entry.hook();
            let Some(in_batch) = of_hook(py, hook) else {
                return Ok(None);
            };
            let Some(merging) = in_batch.merges(hook.object().bind(py), phase, owner)? else {
                return Ok(None);
            };
            let merged = in_batch_of(merging.hook.bind(py))?;
            if keeps && !merged.keeps() {
                return Ok(None);
            }
            keeps = merged.keeps();
            let class: &dyn Any = merged;
            simple.kinds.push((keeps, class.type_id()));
            simple.merging.push(merging);
        }
        Ok(Some(simple))
    }
}

/// Runs of merged hooks in one call.
pub struct Stages<'a, 'py> {
    pub hooks: &'a MergedHooks,
    pub batch: &'a BatchBase,
    pub layout: &'a Layout,
    pub run: Option<&'a PhaseRun<'py>>,
    /// Describes a hook, for errors.
    pub describe: &'a dyn Fn(&Entry<Hook>) -> String,
}

/// Takes the error of a hook of the member with a number. Returns true if the member goes on.
pub type Fail<'a> = dyn FnMut(usize, &Entry<Hook>, PyErr) -> PyResult<bool> + 'a;

impl<'py> Stages<'_, 'py> {
    fn entry(&self, (member, at): HookAt) -> &Entry<Hook> {
        &self.hooks.members[member].entries[at]
    }

    fn owner(&self, py: Python<'py>, member: usize) -> &Bound<'py, Frame> {
        let number = self.hooks.members[member].number;
        self.batch.all()[number].frame.bind(py)
    }

    /// Calls `run` with the parts of some hooks.
    fn with_parts<R>(
        &self,
        py: Python<'_>,
        stage: &[HookAt],
        run: impl FnOnce(&[MergedPart<'_, '_>]) -> PyResult<R>,
    ) -> PyResult<R> {
        let describes: Vec<_> = stage
            .iter()
            .map(|at| {
                let entry = self.entry(*at);
                move || (self.describe)(entry)
            })
            .collect();
        let mut parts = Vec::with_capacity(stage.len());
        for (at, describe) in stage.iter().zip(&describes) {
            let simple = &self.hooks.members[at.0];
            let merging = &simple.merging[at.1];
            let all = self.layout.rows(self.batch.all(), simple.number);
            let rows = match self.places(*at) {
                None => Cow::Borrowed(all),
                Some(places) => Cow::Owned(all.at(&places).ok_or_else(|| {
                    rows_error(py, "positions of other rows than the member has")
                })?),
            };
            parts.push(MergedPart {
                hook: merging.hook.bind(py),
                key: (simple.number, merging.at.as_ref().map(|(at, _)| *at)),
                rows,
                describe,
            });
        }
        run(&parts)
    }

    /// Places of a hook's tokens among its member's tokens; None if it is for all.
    fn places(&self, (member, at): HookAt) -> Option<Vec<TokenPlace>> {
        let simple = &self.hooks.members[member];
        let (_, of_batch) = simple.merging[at].at.as_ref()?;
        Some(self.layout.places(simple.number, of_batch))
    }

    /// True if a hook is for all tokens of its member, or for some.
    fn has_tokens(&self, at: HookAt) -> bool {
        self.places(at).is_none_or(|places| !places.is_empty())
    }

    fn in_batch<'a>(&'a self, py: Python<'a>, (member, at): HookAt) -> PyResult<&'a dyn InBatch> {
        in_batch_of(self.hooks.members[member].merging[at].hook.bind(py))
    }

    /// Returns the positions of a hook's tokens, if known.
    fn positions(&self, at: HookAt) -> Option<TokenPositions> {
        let number = self.hooks.members[at.0].number;
        let of_member = self.batch.positions_of(self.layout, number)?;
        match self.places(at) {
            None => of_member.of_whole(),
            Some(places) => of_member.at(&places, self.layout.dim),
        }
    }

    /// Picks the next stage: all pending hooks of one class, interventions before captures.
    fn next(&self, running: &[Option<usize>]) -> Vec<HookAt> {
        let running = running.iter().enumerate();
        let next = running.filter_map(|(member, at)| {
            let kind = self.hooks.members[member].kinds.get((*at)?)?;
            Some((kind, (member, (*at)?)))
        });
        let first = next.clone().map(|(kind, _)| kind).min();
        next.filter(|(kind, _)| Some(*kind) == first)
            .map(|(_, at)| at)
            .collect()
    }

    /// Runs the hooks. Returns the changed value, None if nothing changed it; an inner error means
    /// that each member's hooks have to run alone. `replaced` gets the members whose rows changed.
    pub fn run(
        &self,
        value: &Bound<'py, PyAny>,
        fail: &mut Fail<'_>,
        mut replaced: Option<&mut Vec<usize>>,
    ) -> PyResult<PyResult<Option<Bound<'py, PyAny>>>> {
        let inside = Inside::here();
        let mut running: Vec<Option<usize>> = vec![Some(0); self.hooks.members.len()];
        for simple in &self.hooks.members {
            note_run(&self.batch.all()[simple.number]);
        }
        let skipped = if self.hooks.checked(value)? {
            Vec::new()
        } else {
            self.check(value, &inside, &mut running, fail)?
        };
        let mut changed = None;
        loop {
            let mut stage = self.next(&running);
            if stage.is_empty() {
                return Ok(Ok(changed));
            }
            for (member, at) in &stage {
                running[*member] = Some(at + 1);
            }
            let mut invocations = Vec::with_capacity(stage.len());
            stage.retain(|at| {
                let invocation = if skipped.contains(at) {
                    None
                } else {
                    let owner = Some(self.owner(value.py(), at.0));
                    let entry = self.entry(*at);
                    let run = self.run;
                    Owned { entry, owner, run }.enter(&inside)
                };
                invocation.map(|it| invocations.push(it)).is_some()
            });
            stage.retain(|at| self.has_tokens(*at));
            if stage.is_empty() {
                continue;
            }
            let shared = SharedValue {
                value: changed.as_ref().unwrap_or(value),
                layout: self.layout,
                written: self.batch.runs_python(),
                owner: &|part| self.owner(value.py(), stage[part].0).clone().into_any(),
                positions: &|part| self.positions(stage[part]),
                describe: &|part| (self.describe)(self.entry(stage[part])),
            };
            let merged = match self.joint(value.py(), &stage)?.run(&shared) {
                Ok(merged) => merged,
                Err(error) if is_fault(value.py(), &error) => return Ok(Err(error)),
                Err(error) => return Err(error),
            };
            for (number, error) in merged.failed {
                let at = stage[number];
                if !fail(self.hooks.members[at.0].number, self.entry(at), error)? {
                    running[at.0] = None;
                }
            }
            if let (Some(replaced), Some(_)) = (&mut replaced, &merged.value) {
                replaced.extend(stage.iter().map(|at| self.hooks.members[at.0].number));
            }
            changed = merged.value.or(changed);
            // The innermost first, as they are left in order.
            while invocations.pop().is_some() {}
        }
    }

    fn joint(&self, py: Python<'_>, stage: &[HookAt]) -> PyResult<Arc<dyn Joint>> {
        self.hooks.joint(stage, || {
            let in_batch = self.in_batch(py, stage[0])?;
            // A repeat may have other positions than the batch has now.
            let repeats = self.run.is_some_and(|run| run.replay().is_some());
            let select = Select(if repeats {
                None
            } else {
                self.batch.selections(self.layout)
            });
            self.with_parts(py, stage, |parts| in_batch.join(parts, &select))
        })
    }

    /// Checks all hooks before one runs: the rows of a member that fails stay as they are. Returns
    /// the hooks to skip.
    fn check(
        &self,
        value: &Bound<'py, PyAny>,
        inside: &Inside,
        running: &mut [Option<usize>],
        fail: &mut Fail<'_>,
    ) -> PyResult<Vec<HookAt>> {
        let py = value.py();
        let mut skipped = Vec::new();
        let mut ahead = running.to_vec();
        let mut fine = true;
        loop {
            let stage = self.next(&ahead);
            let Some(first) = stage.first() else {
                break;
            };
            let in_batch = self.in_batch(py, *first)?;
            let mut concerned = stage.clone();
            concerned.retain(|at| self.has_tokens(*at));
            let check = |parts: &[MergedPart<'_, '_>]| in_batch.check_parts(parts, value);
            let failed = self.with_parts(py, &concerned, check)?;
            fine &= failed.is_empty();
            for (number, error) in failed {
                let at = concerned[number];
                let (entry, owner) = (self.entry(at), Some(self.owner(py, at.0)));
                let run = self.run;
                let _counted = Owned { entry, owner, run }.enter(inside);
                if fail(self.hooks.members[at.0].number, self.entry(at), error)? {
                    skipped.push(at);
                } else {
                    (running[at.0], ahead[at.0]) = (None, None);
                }
            }
            for (member, at) in stage {
                ahead[member] = ahead[member].map(|_| at + 1);
            }
        }
        if fine && self.hooks.last {
            self.hooks.check(value)?;
        }
        Ok(skipped)
    }
}
