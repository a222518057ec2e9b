use std::sync::{Arc, Weak};

use crate::phase::Phase;
use crate::registry::Shared;
use crate::sync::Ordering;

// One word tells a call all that it has to look for.
const PHASES: usize = Phase::ALL.len();
/// A bit for each phase that has hooks in the registry.
const HOOKS: u64 = (1 << PHASES) - 1;
/// A bit for each phase that a watch was told of, until the last one is gone.
const WATCHED: u64 = HOOKS << PHASES;
/// One watch: 28 bits.
pub(crate) const WATCH: u64 = 1 << (2 * PHASES);
const WATCHES: u64 = ((1 << 28) - 1) * WATCH;
/// One request to time the module: 28 bits.
pub(crate) const TIME: u64 = WATCH << 28;

/// The work of a call as a registry's word had it: which phases may have hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work(pub(crate) u64);

impl Work {
    /// Whether there is nothing to do.
    #[must_use]
    #[inline]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Whether the registry may have hooks for `phase`. False means that it has none.
    #[must_use]
    #[inline]
    pub const fn occupied(self, phase: Phase) -> bool {
        self.0 & phase.bit() != 0
    }

    /// Whether a [`Watch`] was told of `phase`: other registries may have hooks for it.
    #[must_use]
    #[inline]
    pub const fn watched(self, phase: Phase) -> bool {
        self.0 & (phase.bit() << PHASES) != 0
    }

    /// Whether the time that the module takes is to be measured.
    #[must_use]
    #[inline]
    pub const fn timed(self) -> bool {
        self.0 >= TIME
    }
}

/// Keeps a registry from being idle, and not alive, until it is dropped.
pub struct Watch<H> {
    registry: Weak<Shared<H>>,
    unit: u64,
}

impl<H> Watch<H> {
    pub(crate) fn start(registry: &Arc<Shared<H>>, unit: u64) -> Self {
        registry.work.fetch_add(unit, Ordering::Release);
        Self {
            registry: Arc::downgrade(registry),
            unit,
        }
    }

    /// Tells calls of `phase`, for as long as there is any watch.
    pub fn add(&self, phase: Phase) {
        if let Some(registry) = self.registry.upgrade() {
            let bit = phase.bit() << PHASES;
            registry.work.fetch_or(bit, Ordering::Release);
        }
    }

    /// Whether the registry is gone.
    #[must_use]
    pub fn gone(&self) -> bool {
        self.registry.strong_count() == 0
    }
}

impl<H> Drop for Watch<H> {
    fn drop(&mut self) {
        let Some(registry) = self.registry.upgrade() else {
            return;
        };
        let leave = |word: u64| {
            let left = word - self.unit;
            let watched = left & WATCHES != 0;
            Some(if watched { left } else { left & !WATCHED })
        };
        // Relaxed where it fails: it is tried again with what was there.
        let _ = registry
            .work
            .fetch_update(Ordering::Release, Ordering::Relaxed, leave);
    }
}
