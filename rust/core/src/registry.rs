use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::WaitError;
use crate::handle::Handle;
use crate::phase::Phase;
use crate::placement::Placement;
use crate::shared::Shared;
use crate::snapshot::{Entry, Snapshot};
use crate::state::{HookState, deadline};
use crate::watch::Watch;
use crate::work::{self, Work};

/// The ordered hooks of one module, all phases.
///
/// `H` is the callback; the registry only ever drops it. No lock is held while a snapshot is walked
/// or a callback dropped, so callbacks may call anything here.
pub struct Registry<H> {
    shared: Arc<Shared<H>>,
}

impl<H> Registry<H> {
    /// A registry without hooks.
    #[must_use]
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared::new()),
        }
    }

    /// Adds `hook` to `phase`. Phases that have begun do not fire it.
    pub fn register(&self, phase: Phase, hook: H, placement: Placement) -> Handle<H> {
        self.push(HookState::new(phase, placement, false), hook)
    }

    /// Adds a hook that stays after all others, whatever their priorities, until its handle
    /// removes it: `clear` leaves it and `fork` does not copy it.
    pub fn register_last(&self, phase: Phase, hook: H) -> Handle<H> {
        self.push(HookState::new(phase, Placement::default(), true), hook)
    }

    fn push(&self, state: HookState, hook: H) -> Handle<H> {
        let state = Arc::new(state);
        self.shared.push(Arc::new(Entry {
            state: Arc::clone(&state),
            hook,
        }));
        Handle {
            state,
            registry: Arc::downgrade(&self.shared),
        }
    }

    /// Reads the work of a call: one atomic load.
    #[must_use]
    #[inline]
    pub fn work(&self) -> Work {
        self.shared.work()
    }

    /// True if `phase` may have hooks; false if it has none.
    #[must_use]
    pub fn occupied(&self, phase: Phase) -> bool {
        self.work().occupied(phase)
    }

    /// True if a call has nothing to do: no hooks and no [`Watch`].
    #[must_use]
    #[inline]
    pub fn idle(&self) -> bool {
        self.work().is_none()
    }

    /// Keeps the registry from being idle, for hooks of other registries that fire on the same
    /// module.
    #[must_use]
    pub fn watch(&self) -> Watch<H> {
        Watch::start(&self.shared, work::WATCH)
    }

    /// Makes calls measure how long the module runs.
    #[must_use]
    pub fn time(&self) -> Watch<H> {
        Watch::start(&self.shared, work::TIME)
    }

    /// The hooks of `phase` as they are now, in firing order.
    ///
    /// The first two calls after a change build the list; later ones share it.
    #[must_use]
    #[inline]
    pub fn snapshot(&self, phase: Phase) -> Snapshot<H> {
        Snapshot(self.shared.snapshot(phase))
    }

    /// Makes a handle for one of the hooks, like the one that registering returned.
    #[must_use]
    pub fn handle(&self, entry: &Entry<H>) -> Handle<H> {
        Handle {
            state: Arc::clone(&entry.state),
            registry: Arc::downgrade(&self.shared),
        }
    }

    /// Removes every hook of `phase`, or of all phases, but for those registered last.
    pub fn clear(&self, phase: Option<Phase>) {
        for each in Phase::ALL {
            if phase.is_none_or(|wanted| wanted == each) && self.occupied(each) {
                // Drops callbacks with the lock released.
                drop(self.shared.clear(each, |state| !state.last()));
            }
        }
    }

    /// Removes every hook, those registered last included: for a garbage collector.
    pub fn clear_all(&self) {
        for phase in Phase::ALL {
            drop(self.shared.clear(phase, |_| true));
        }
    }

    /// Copies the hooks, but for those registered last, into a new registry, in the same order and
    /// with new ids. `copy` makes the new callbacks and may call anything.
    ///
    /// # Errors
    ///
    /// The first error of `copy`; no registry is made then.
    pub fn fork<E>(
        &self,
        mut copy: impl FnMut(&Self, Phase, &H) -> Result<H, E>,
    ) -> Result<Self, E> {
        let fork = Self::new();
        for phase in Phase::ALL {
            let snapshot = self.snapshot(phase);
            let entries = snapshot.entries().iter();
            let live = entries.filter(|entry| !entry.removed() && !entry.last());
            // By age, so that hooks of one priority keep their order, whatever priorities become.
            let mut live: Vec<_> = live.collect();
            live.sort_unstable_by_key(|entry| entry.id());
            for entry in live {
                let placement = Placement {
                    priority: entry.priority(),
                    prepend: entry.state.prepended(),
                };
                let handle = fork.register(phase, copy(&fork, phase, &entry.hook)?, placement);
                handle.set_enabled(entry.enabled());
            }
        }
        Ok(fork)
    }

    /// Waits until each hook of the registry, removed ones included, was idle (without a thread
    /// inside) for an instant.
    ///
    /// # Errors
    ///
    /// [`WaitError::Inside`] when called from inside one of the hooks, [`WaitError::TimedOut`]
    /// when a thread is still inside one after `timeout`.
    pub fn quiesce(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        self.active().wait_idle(timeout)
    }

    /// Collects the hooks, removed ones included, that a thread is inside of now.
    /// [`Registry::quiesce`] waits for these; they need neither the registry nor its locks.
    #[must_use]
    pub fn active(&self) -> Active {
        Active(
            Phase::ALL
                .into_iter()
                .flat_map(|phase| self.shared.active(phase))
                .collect(),
        )
    }

    /// Visits each callback that the registry owns, once, for a garbage collector. `visit` runs
    /// under a lock and must not call back into the registry.
    ///
    /// # Errors
    ///
    /// The first error of `visit`.
    pub fn visit<E>(&self, mut visit: impl FnMut(&H) -> Result<(), E>) -> Result<(), E> {
        Phase::ALL
            .into_iter()
            .try_for_each(|phase| self.shared.visit(phase, &mut visit))
    }
}

/// Hooks that a thread was inside of.
#[derive(Debug)]
pub struct Active(Vec<Arc<HookState>>);

impl Active {
    /// True if no thread was inside any hook.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the hooks of `others`.
    #[must_use]
    pub fn and(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// Waits until each of the hooks was idle for an instant.
    ///
    /// # Errors
    ///
    /// Errors of [`Registry::quiesce`].
    pub fn wait_idle(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let deadline = deadline(timeout);
        // Checked before the first wait: other waiters may depend on a hook that this thread is in.
        if self.0.iter().any(|state| state.inside()) {
            return Err(WaitError::Inside);
        }
        self.0
            .iter()
            .try_for_each(|state| state.wait_idle(deadline))
    }
}

impl<H> Default for Registry<H> {
    fn default() -> Self {
        Self::new()
    }
}

impl<H> fmt::Debug for Registry<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(Phase::ALL.map(|phase| (phase, self.snapshot(phase).len())))
            .finish()
    }
}
