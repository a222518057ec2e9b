//! Hooks of one phase of one call, and their owners.

use std::rc::Rc;
use std::sync::Arc;

use ferrohook_core::{Entry, Inside, Invocation, Snapshot};
use pyo3::prelude::*;

use crate::contexts::frame::Frame;
use crate::contexts::log::{KeptHook, PhaseRun};
use crate::hooks::hook::Hook;

/// A hook whose turn comes, and the frame that it fires for; None: a global hook.
#[derive(Clone, Copy)]
pub struct Owned<'a, 'py> {
    pub entry: &'a Entry<Hook>,
    pub owner: Option<&'a Bound<'py, Frame>>,
    /// Run of the phase in a checkpointed forward or its repeat.
    pub run: Option<&'a PhaseRun<'py>>,
}

impl<'a, 'py> Owned<'a, 'py> {
    /// Enters the hook, unless it is removed or disabled, or its owner has ended. Call it right before
    /// each invocation.
    #[expect(
        clippy::inline_always,
        reason = "part of the walk: a seventh of its time per hook"
    )]
    #[inline(always)]
    pub fn enter(self, inside: &'a Inside) -> Option<Invocation<'a>> {
        if let Some(run) = self.run {
            return self.enter_logged(run, inside);
        }
        if self.ended() {
            return None;
        }
        self.entry.enter(inside)
    }

    /// True once its owner has ended: the hook is not started any more.
    #[inline]
    pub fn ended(&self) -> bool {
        self.owner
            .is_some_and(|owner| owner.get().ended_for(self.entry.phase()))
    }

    #[cold]
    #[inline(never)]
    fn enter_logged(self, run: &'a PhaseRun<'py>, inside: &'a Inside) -> Option<Invocation<'a>> {
        run.enter(self.entry, self.owner, inside)
    }

    /// The owner, for hooks that know its class.
    pub fn object(self) -> Option<&'a Bound<'py, PyAny>> {
        self.owner.map(Bound::as_any)
    }
}

/// Hooks of one phase of one call in firing order, each with its owner.
pub struct Firing<'py> {
    snapshot: Snapshot<Hook>,
    owners: Owners<'py>,
}

enum Owners<'py> {
    Global,
    One(Bound<'py, Frame>),
    Many(Box<MergedHooksOfFrames<'py>>),
    /// Hooks of a checkpointed forward or its repeat, with the run of the phase.
    Logged(Box<(MergedHooksOfFrames<'py>, Rc<PhaseRun<'py>>)>),
}

/// Owners of merged snapshots, and for each hook the number of its snapshot.
struct MergedHooksOfFrames<'py> {
    owners: Vec<Option<Bound<'py, Frame>>>,
    numbers: Box<[usize]>,
}

impl<'py> MergedHooksOfFrames<'py> {
    fn of(&self, at: usize) -> Option<&Bound<'py, Frame>> {
        self.owners[self.numbers[at]].as_ref()
    }
}

impl<'py> Firing<'py> {
    /// Global hooks.
    pub fn global(snapshot: Snapshot<Hook>) -> Self {
        Self {
            snapshot,
            owners: Owners::Global,
        }
    }

    /// Makes them of hooks in this order, each with its owner.
    pub fn of(hooks: Vec<KeptHook<'py>>) -> Self {
        let numbers = (0..hooks.len()).collect();
        let (entries, owners) = hooks.into_iter().unzip();
        Self {
            snapshot: Snapshot::of(entries),
            owners: Owners::Many(Box::new(MergedHooksOfFrames { owners, numbers })),
        }
    }

    /// No hooks.
    pub fn none() -> Self {
        Self::global(Snapshot::of(Vec::new()))
    }

    /// The same hooks, in the run of a phase.
    pub fn in_run(self, run: PhaseRun<'py>) -> Self {
        let alike = |owner| MergedHooksOfFrames {
            owners: vec![owner],
            numbers: vec![0; self.entries().len()].into(),
        };
        let merged = match self.owners {
            Owners::Global => alike(None),
            Owners::One(ref owner) => alike(Some(owner.clone())),
            Owners::Many(merged) => *merged,
            Owners::Logged(logged) => logged.0,
        };
        Self {
            owners: Owners::Logged(Box::new((merged, Rc::new(run)))),
            snapshot: self.snapshot,
        }
    }

    /// Returns the run of the phase in a checkpointed forward or its repeat.
    pub fn run(&self) -> Option<&Rc<PhaseRun<'py>>> {
        match &self.owners {
            Owners::Logged(logged) => Some(&logged.1),
            _ => None,
        }
    }

    /// Merges the hooks of frames, the outermost first, and the global ones; None if there are
    /// none.
    pub fn merged(
        of_frames: impl Iterator<Item = (Bound<'py, Frame>, Snapshot<Hook>)>,
        global: Option<Snapshot<Hook>>,
    ) -> Option<Self> {
        let of_frames = of_frames.map(|(owner, snapshot)| (Some(owner), snapshot));
        let mut parts = of_frames.chain(global.map(|snapshot| (None, snapshot)));
        let first = parts.next()?;
        let Some(second) = parts.next() else {
            let (owner, snapshot) = first;
            let owners = owner.map_or(Owners::Global, Owners::One);
            return Some(Self { snapshot, owners });
        };
        let parts = [first, second].into_iter().chain(parts);
        let (owners, snapshots): (Vec<_>, Vec<_>) = parts.unzip();
        let (snapshot, numbers) = Snapshot::merged(&snapshots);
        Some(Self {
            snapshot,
            owners: Owners::Many(Box::new(MergedHooksOfFrames { owners, numbers })),
        })
    }

    /// The hooks in firing order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = Owned<'_, 'py>> {
        let entries = self.entries().iter().enumerate();
        entries.map(|(at, entry)| Owned {
            entry,
            owner: match &self.owners {
                Owners::Global => None,
                Owners::One(owner) => Some(owner),
                Owners::Many(merged) => merged.of(at),
                Owners::Logged(logged) => logged.0.of(at),
            },
            run: match &self.owners {
                Owners::Logged(logged) => Some(&logged.1),
                _ => None,
            },
        })
    }

    /// The hooks in firing order, if all are global and nothing is logged: their walk asks for
    /// no owner.
    #[inline]
    pub fn all_global(&self) -> Option<impl Iterator<Item = Owned<'_, 'py>>> {
        let global = matches!(self.owners, Owners::Global);
        global.then(|| {
            self.entries().iter().map(|entry| Owned {
                entry,
                owner: None,
                run: None,
            })
        })
    }

    /// The hooks in firing order, to be kept beyond the phase.
    pub fn shared(&self) -> impl Iterator<Item = (Owned<'_, 'py>, &Arc<Entry<Hook>>)> {
        self.iter().zip(self.entries())
    }

    /// The hooks in firing order, without their owners.
    pub fn entries(&self) -> &[Arc<Entry<Hook>>] {
        self.snapshot.entries()
    }
}
