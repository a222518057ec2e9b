use std::sync::{Arc, Weak};

use crate::phase::Phase;
use crate::registry::Shared;
use crate::sync::Ordering;

// All that a call has to look for, in one word.
const PHASES: usize = Phase::ALL.len();
/// One bit for each phase that has hooks in the registry.
const HOOKS: u64 = (1 << PHASES) - 1;
/// One bit for each phase added to a watch, set until the last watch is gone.
const WATCHED: u64 = HOOKS << PHASES;
/// One watch: 28 bits.
pub(crate) const WATCH: u64 = 1 << (2 * PHASES);
const WATCHES: u64 = ((1 << 28) - 1) * WATCH;
/// One request to time the module: 28 bits.
pub(crate) const TIME: u64 = WATCH << 28;

/// Work of a call, read from a registry's word: the phases that may have hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work(pub(crate) u64);

impl Work {
    /// True if there is nothing to do.
    #[must_use]
    #[inline]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// True if the registry may have hooks for `phase`; false if it has none.
    #[must_use]
    #[inline]
    pub const fn occupied(self, phase: Phase) -> bool {
        self.0 & phase.bit() != 0
    }

    /// True if a [`Watch`] covers `phase`: other registries may have hooks for it.
    #[must_use]
    #[inline]
    pub const fn watched(self, phase: Phase) -> bool {
        self.0 & (phase.bit() << PHASES) != 0
    }

    /// True if the run time of the module is to be measured.
    #[must_use]
    #[inline]
    pub const fn timed(self) -> bool {
        self.0 >= TIME
    }
}

/// Guard that keeps a registry from being idle. It does not keep the registry alive.
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

    /// Marks `phase` as watched, for as long as any watch exists.
    pub fn add(&self, phase: Phase) {
        if let Some(registry) = self.registry.upgrade() {
            let bit = phase.bit() << PHASES;
            registry.work.fetch_or(bit, Ordering::Release);
        }
    }

    /// True if the registry was dropped.
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
        // Relaxed on failure: the update is retried with the current word.
        let _ = registry
            .work
            .fetch_update(Ordering::Release, Ordering::Relaxed, leave);
    }
}
