use std::sync::{Arc, Weak};

use crate::phase::Phase;
use crate::shared::Shared;
use crate::sync::Ordering;
use crate::work::{PHASES, WATCHED, WATCHES};

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
