//! Hooks of the members of a batch for one phase of one call.

use std::sync::Arc;

use ferrohook_core::{Entry, Phase, Snapshot};
use pyo3::prelude::*;

use crate::call::Call;
use crate::contexts::owners::Firing;
use crate::hooks::hook::Hook;
use crate::rows::batch::BatchBase;
use crate::rows::merged::MergedHooks;

/// Number of a member, and hooks of it in firing order.
pub type Hooks<'a> = (usize, &'a [Arc<Entry<Hook>>]);

/// Hooks of a batch's members for one phase of one call.
pub struct MemberHooks<'py> {
    pub batch: Bound<'py, BatchBase>,
    pub hooks: Found,
    /// Number of changes of the members' hooks before these were looked for.
    pub epoch: u64,
    /// Number of gaps between the hooks of the whole batch.
    gaps: usize,
}

pub enum Found {
    /// Remembered as they merge; the batch has no hooks of its own.
    Merged(Arc<MergedHooks>),
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
    /// Takes the hooks of the members of a batch; None if none has one. `recall`: those that are
    /// remembered as they merge, if there are.
    #[cold]
    pub fn begin(
        batch: &Bound<'py, BatchBase>,
        call: &Call<'_, 'py>,
        phase: Phase,
        whole: Option<&Firing<'py>>,
        recall: bool,
    ) -> Option<Self> {
        let this = batch.get();
        let module = call.registry.get().module();
        let epoch = this.epoch();
        let remembered = recall.then(|| this.recall(call.module, module)).flatten();
        let hooks = match remembered {
            Some(merged) => Found::Merged(merged),
            None => Found::Each(resolve(batch, module, phase, whole)?),
        };
        Some(Self {
            batch: batch.clone(),
            hooks,
            epoch,
            gaps: 1 + whole.map_or(0, |whole| whole.entries().len()),
        })
    }

    /// The members with hooks in a gap, and these hooks.
    pub fn in_gap(&self, gap: usize) -> impl Iterator<Item = Hooks<'_>> {
        let members: &[MemberSnapshot] = match &self.hooks {
            Found::Merged(_) => &[],
            Found::Each(members) => members,
        };
        members.iter().filter_map(move |member| {
            let entries = member.snapshot.entries();
            let start = gap.checked_sub(1).map_or(0, |before| member.ahead[before]);
            let end = member.ahead.get(gap).map_or(entries.len(), |end| *end);
            (start < end).then(|| (member.number, &entries[start..end]))
        })
    }

    /// True if the batch has no hooks of its own.
    pub fn all(&self) -> bool {
        self.gaps == 1
    }
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
