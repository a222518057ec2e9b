//! Hooks of one phase of one call, and their owners.

use std::sync::Arc;

use ferrohook_core::{Entry, Inside, Invocation, Snapshot};
use pyo3::prelude::*;

use crate::contexts::frame::Frame;
use crate::hooks::hook::Hook;

/// A hook whose turn comes, and the frame that it fires for; None: for everybody.
#[derive(Clone, Copy)]
pub struct Owned<'a, 'py> {
    pub entry: &'a Entry<Hook>,
    pub owner: Option<&'a Bound<'py, Frame>>,
}

impl<'a, 'py> Owned<'a, 'py> {
    /// Enters the hook, unless it is removed or disabled, or its owner has ended. Call it right before
    /// each invocation.
    #[inline]
    pub fn enter(self, inside: &'a Inside) -> Option<Invocation<'a>> {
        if let Some(owner) = self.owner
            && owner.get().ended_for(self.entry.phase())
        {
            return None;
        }
        self.entry.enter(inside)
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
    Everybody,
    One(Bound<'py, Frame>),
    Many(Box<Merged<'py>>),
}

/// Owners of merged snapshots, and for each hook the number of its snapshot.
struct Merged<'py> {
    owners: Vec<Option<Bound<'py, Frame>>>,
    numbers: Box<[usize]>,
}

impl<'py> Firing<'py> {
    /// Hooks that fire for everybody.
    pub fn everybody(snapshot: Snapshot<Hook>) -> Self {
        Self {
            snapshot,
            owners: Owners::Everybody,
        }
    }

    /// Merges the hooks of frames, the outermost first, and those for everybody; None if there are
    /// none.
    pub fn merged(
        of_frames: impl Iterator<Item = (Bound<'py, Frame>, Snapshot<Hook>)>,
        everybody: Option<Snapshot<Hook>>,
    ) -> Option<Self> {
        let of_frames = of_frames.map(|(owner, snapshot)| (Some(owner), snapshot));
        let mut parts = of_frames.chain(everybody.map(|snapshot| (None, snapshot)));
        let first = parts.next()?;
        let Some(second) = parts.next() else {
            let (owner, snapshot) = first;
            let owners = owner.map_or(Owners::Everybody, Owners::One);
            return Some(Self { snapshot, owners });
        };
        let parts = [first, second].into_iter().chain(parts);
        let (owners, snapshots): (Vec<_>, Vec<_>) = parts.unzip();
        let (snapshot, numbers) = Snapshot::merged(&snapshots);
        Some(Self {
            snapshot,
            owners: Owners::Many(Box::new(Merged { owners, numbers })),
        })
    }

    /// The hooks in firing order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = Owned<'_, 'py>> {
        let entries = self.entries().iter().enumerate();
        entries.map(|(at, entry)| Owned {
            entry,
            owner: match &self.owners {
                Owners::Everybody => None,
                Owners::One(owner) => Some(owner),
                Owners::Many(merged) => merged.owners[merged.numbers[at]].as_ref(),
            },
        })
    }

    /// The hooks in firing order, if all are for everybody: their walk asks for no owner.
    #[inline]
    pub fn of_everybody(&self) -> Option<impl Iterator<Item = Owned<'_, 'py>>> {
        let everybody = matches!(self.owners, Owners::Everybody);
        everybody.then(|| {
            self.entries()
                .iter()
                .map(|entry| Owned { entry, owner: None })
        })
    }

    /// The hooks in firing order, without their owners.
    pub fn entries(&self) -> &[Arc<Entry<Hook>>] {
        self.snapshot.entries()
    }
}
