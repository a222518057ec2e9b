use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::WaitError;
use crate::phase::Phase;
use crate::shared::Shared;
use crate::snapshot::Snapshot;
use crate::state::{HookId, HookState, deadline};

/// Handle of one registered hook: removes, disables and describes it.
///
/// Keeps neither the callback nor the registry alive. Dropping it leaves the hook registered.
pub struct Handle<H> {
    pub(crate) state: Arc<HookState>,
    pub(crate) registry: Weak<Shared<H>>,
}

impl<H> Handle<H> {
    /// Id of the hook.
    #[must_use]
    pub fn id(&self) -> HookId {
        self.state.id
    }

    /// Phase that the hook is registered for.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.state.phase
    }

    /// True if the hook was removed.
    #[must_use]
    pub fn removed(&self) -> bool {
        self.state.removed()
    }

    /// True if the hook fires when its turn comes.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.state.enabled()
    }

    /// Number of invocations that have ended.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state.calls()
    }

    /// True once a trace has the hook: code compiled from it invokes the callback and counts nothing.
    #[must_use]
    pub fn traced(&self) -> bool {
        self.state.traced()
    }

    /// Current priority of the hook; higher fires first.
    #[must_use]
    pub fn priority(&self) -> i64 {
        self.state.priority()
    }

    /// Removes the hook: a phase that has not reached it yet will not invoke it. Returns true for
    /// the call that removed it. Takes amortised constant time.
    #[allow(
        clippy::must_use_candidate,
        reason = "called for its effect; callers rarely need to know who was first"
    )]
    pub fn remove(&self) -> bool {
        if !self.state.mark_removed() {
            return false;
        }
        if let Some(registry) = self.registry.upgrade() {
            registry.note_removal(self.state.phase);
        }
        true
    }

    /// True if the calling thread is inside the hook and so must not wait for it.
    #[must_use]
    pub fn inside(&self) -> bool {
        self.state.inside()
    }

    /// Waits until no thread is inside the hook. After [`Handle::remove`] and this, resources of the
    /// hook can be freed.
    ///
    /// # Errors
    ///
    /// [`WaitError::Inside`] when called from inside the hook, [`WaitError::TimedOut`] when a
    /// thread is still inside after `timeout`.
    pub fn wait_idle(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        self.state.wait_idle(deadline(timeout))
    }

    /// Enables or disables the hook; its place in the order stays.
    pub fn set_enabled(&self, enabled: bool) {
        self.state.set_enabled(enabled);
    }

    /// Passes the callback to `read`; None once the registry has dropped it.
    pub fn read<R>(&self, read: impl FnOnce(&H) -> R) -> Option<R> {
        let snapshot = Snapshot(self.registry.upgrade()?.snapshot(self.state.phase));
        let mut entries = snapshot.iter();
        let entry = entries.find(|entry| Arc::ptr_eq(&entry.state, &self.state))?;
        Some(read(&entry.hook))
    }

    /// Moves the hook in the order of its phase; phases that have begun keep their order.
    pub fn set_priority(&self, priority: i64) {
        if let Some(registry) = self.registry.upgrade() {
            registry.set_priority(&self.state, priority);
        } else {
            self.state.set_priority(priority);
        }
    }
}

impl<H> fmt::Debug for Handle<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("id", &self.id())
            .field("phase", &self.phase())
            .field("removed", &self.removed())
            .finish_non_exhaustive()
    }
}
