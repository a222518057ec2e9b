use crate::phase::Phase;

// All that a call has to look for, in one word.
pub(crate) const PHASES: usize = Phase::ALL.len();
/// One bit for each phase that has hooks in the registry.
const HOOKS: u64 = (1 << PHASES) - 1;
/// One bit for each phase added to a watch, set until the last watch is gone.
pub(crate) const WATCHED: u64 = HOOKS << PHASES;
/// One watch: 28 bits.
pub(crate) const WATCH: u64 = 1 << (2 * PHASES);
pub(crate) const WATCHES: u64 = ((1 << 28) - 1) * WATCH;
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

    /// True if a [`Watch`](crate::Watch) covers `phase`: other registries may have hooks for it.
    #[must_use]
    #[inline]
    pub const fn watched(self, phase: Phase) -> bool {
        self.0 & (phase.bit() << PHASES) != 0
    }

    /// The same work with every phase watched, whether or not a [`Watch`](crate::Watch) covers it.
    #[must_use]
    #[inline]
    pub const fn watching(self) -> Self {
        Self(self.0 | WATCHED)
    }

    /// True if the run time of the module is to be measured.
    #[must_use]
    #[inline]
    pub const fn timed(self) -> bool {
        self.0 >= TIME
    }
}
