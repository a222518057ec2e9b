//! Hooks of the members of a batch for one phase of one call.

use std::rc::Rc;
use std::sync::Arc;

use ferrohook_core::{Entry, Phase, Snapshot};
use pyo3::prelude::*;

use crate::call::Call;
use crate::contexts::log::{Logged, PhaseRun, Replay};
use crate::contexts::owners::Firing;
use crate::hooks::hook::Hook;
use crate::rows::batch::BatchBase;
use crate::rows::calls::program::Program;

/// Number of a member, and hooks of it in firing order.
pub type HooksOfMember<'a> = (usize, &'a [Arc<Entry<Hook>>]);

/// Hooks of a batch's members for one phase of one call.
pub struct MemberHooks<'py> {
    pub batch: Bound<'py, BatchBase>,
    pub hooks: FoundHooks,
    /// Number of changes of the members' hooks before these were looked for.
    pub epoch: u64,
    /// True if the batch itself has no hooks.
    pub alone: bool,
    /// Run of the phase in a checkpointed forward or its repeat.
    pub run: Option<Rc<PhaseRun<'py>>>,
}

pub enum FoundHooks {
    /// A cached program; the batch itself has no hooks.
    Program(Arc<Program>),
    Each(Vec<MemberSnapshot>),
}

/// Hooks of one member.
pub struct MemberSnapshot {
    /// Number of the member.
    number: usize,
    snapshot: Snapshot<Hook>,
    /// Numbers of those ahead of each hook of the whole batch.
    ahead: Box<[usize]>,
}

impl<'py> MemberHooks<'py> {
    /// Takes the hooks of the members of a batch; None if no member has any. `recall`: the cached
    /// program, if there is one.
    #[cold]
    pub fn begin(
        batch: &Bound<'py, BatchBase>,
        call: &Call<'_, 'py>,
        phase: Phase,
        whole: Option<&Firing<'py>>,
        recall: bool,
    ) -> PyResult<Option<Self>> {
        let this = batch.get();
        let module = call.registry.get().module();
        let epoch = this.epoch();
        let run = whole.and_then(Firing::run).map(Rc::clone);
        let id = batch.as_super().get().id();
        let repeated = run.as_ref().and_then(|run| run.replay());
        let repeated = repeated.filter(|it| it.outside.contains(&id));
        let hooks = if let Some(replay) = repeated {
            repeat(batch, replay)
        } else {
            let program = recall
                .then(|| this.cached_program(call.module, module))
                .flatten();
            match program {
                Some(merged) => Some(FoundHooks::Program(merged)),
                None => resolve(batch, module, phase, whole).map(FoundHooks::Each),
            }
        };
        let Some(hooks) = hooks else {
            return Ok(None);
        };
        if let Some(run) = &run {
            run.add_members(batch.as_super(), || hooks.logged(batch))?;
        }
        Ok(Some(Self {
            batch: batch.clone(),
            hooks,
            epoch,
            alone: whole.is_none_or(|whole| whole.entries().is_empty()),
            run,
        }))
    }

    /// Begins as `begin` does, without the cached program, in a phase that has no other hooks.
    pub fn each(&self, call: &Call<'_, 'py>) -> PyResult<Option<Self>> {
        let each = Self::begin(&self.batch, call, Phase::Forward, None, false)?;
        Ok(each.map(|each| Self {
            run: self.run.clone(),
            ..each
        }))
    }

    /// True in the repeat of a checkpointed forward.
    pub fn repeats(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.replay().is_some())
    }

    /// The members with hooks in a gap, and these hooks.
    pub fn in_gap(&self, gap: usize) -> impl Iterator<Item = HooksOfMember<'_>> {
        let members: &[MemberSnapshot] = match &self.hooks {
            FoundHooks::Program(_) => &[],
            FoundHooks::Each(members) => members,
        };
        members.iter().filter_map(move |member| {
            let entries = member.snapshot.entries();
            let start = gap.checked_sub(1).map_or(0, |before| member.ahead[before]);
            let end = member.ahead.get(gap).map_or(entries.len(), |end| *end);
            (start < end).then(|| (member.number, &entries[start..end]))
        })
    }
}

impl FoundHooks {
    /// The hooks as they are logged.
    fn logged(&self, batch: &Bound<'_, BatchBase>) -> PyResult<Vec<Logged>> {
        let py = batch.py();
        let log = |number: usize, entry: &Arc<Entry<Hook>>, ahead| {
            let owner = batch.get().all()[number].frame.bind(py);
            Logged::new(py, entry, Some(owner), ahead)
        };
        let mut all = Vec::new();
        match self {
            Self::Program(merged) => {
                for (number, entries) in &merged.members {
                    for entry in entries {
                        all.push(log(*number, entry, 0)?);
                    }
                }
            }
            Self::Each(members) => {
                for member in members {
                    for (at, entry) in member.snapshot.entries().iter().enumerate() {
                        let ahead = member.ahead.iter().filter(|before| **before <= at).count();
                        all.push(log(member.number, entry, ahead)?);
                    }
                }
            }
        }
        Ok(all)
    }
}

/// Takes the hooks of members that were logged in a forward; None if there are none.
fn repeat(batch: &Bound<'_, BatchBase>, replay: &Replay) -> Option<FoundHooks> {
    let py = batch.py();
    let (_, logged) = replay.log.members()?;
    let mut hooks: Vec<MemberSnapshot> = Vec::new();
    for (number, member) in batch.get().all().iter().enumerate() {
        let id = member.frame.get().id();
        let own = logged.iter().filter(|it| it.key().1 == Some(id));
        // Hooks that are gone since are not needed: the log was checked.
        let own = own.filter_map(|it| Some((it.get(py)?.0, replay.places[it.ahead])));
        let (entries, gaps): (Vec<_>, Vec<_>) = own.unzip();
        if entries.is_empty() {
            continue;
        }
        let whole = replay.places.last().map_or(0, |it| *it);
        let ahead = (0..whole).map(|bound| gaps.iter().filter(|gap| **gap <= bound).count());
        hooks.push(MemberSnapshot {
            number,
            ahead: ahead.collect(),
            snapshot: Snapshot::of(entries),
        });
    }
    (!hooks.is_empty()).then_some(FoundHooks::Each(hooks))
}

/// Takes the snapshots of the members of a batch that have hooks; None if none has.
fn resolve<'py>(
    batch: &Bound<'py, BatchBase>,
    module: u64,
    phase: Phase,
    whole: Option<&Firing<'py>>,
) -> Option<Vec<MemberSnapshot>> {
    let mut hooks = Vec::new();
    let mut now = None;
    for (number, member) in batch.get().all().iter().enumerate() {
        let frame = member.frame.get();
        if frame.failed() || member.rows.len() == 0 {
            continue;
        }
        let Some(snapshot) = frame.snapshot(module, phase) else {
            continue;
        };
        if member.expire(batch.py(), &mut now) {
            continue;
        }
        let bounds = whole.into_iter().flat_map(Firing::entries);
        let ahead = bounds.map(|bound| {
            let entries = snapshot.entries().iter();
            entries.take_while(|it| it.precedes(bound)).count()
        });
        hooks.push(MemberSnapshot {
            number,
            ahead: ahead.collect(),
            snapshot,
        });
    }
    (!hooks.is_empty()).then_some(hooks)
}
