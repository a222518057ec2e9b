use std::fmt;
use std::sync::Arc;

use crate::phase::Phase;
use crate::state::{HookId, HookState, Inside, Invocation};
use crate::sync::{Lease, lease};

/// One registered hook: its callback and its state.
#[derive(Debug)]
pub struct Entry<H> {
    pub(crate) state: Arc<HookState>,
    pub(crate) hook: H,
}

impl<H> Entry<H> {
    /// The callback.
    pub fn hook(&self) -> &H {
        &self.hook
    }

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

    /// Current priority of the hook; higher fires first.
    #[must_use]
    pub fn priority(&self) -> i64 {
        self.state.priority()
    }

    /// True if the hook fires before `other`, in a registry that has both.
    #[must_use]
    pub fn precedes(&self, other: &Self) -> bool {
        self.state.order_key() < other.state.order_key()
    }

    /// True if it was registered by [`Registry::register_last`](crate::Registry::register_last).
    #[must_use]
    pub fn last(&self) -> bool {
        self.state.last()
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

    /// Notes that a trace has the hook, for [`Handle::traced`](crate::Handle::traced).
    pub fn mark_traced(&self) {
        self.state.mark_traced();
    }

    /// Number of invocations that have ended.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state.calls()
    }

    /// Enters the hook, unless it is removed or disabled. Call it right before each invocation and
    /// hold the result until the callback has returned. `inside` belongs to the calling thread.
    #[must_use]
    #[inline]
    pub fn enter<'a>(&'a self, inside: &'a Inside) -> Option<Invocation<'a>> {
        self.state.enter(inside)
    }

    /// Enters the hook, disabled or not, unless it is removed: for the repetition of a call that it
    /// was enabled in.
    #[must_use]
    pub fn enter_disabled<'a>(&'a self, inside: &'a Inside) -> Option<Invocation<'a>> {
        self.state.enter_disabled(inside)
    }

    /// Skips the hook from now on; its place in the order stays. Returns true for the call that
    /// disabled it.
    pub fn disable(&self) -> bool {
        self.state.set_enabled(false)
    }
}

/// The immutable list of hooks that one call walks for one phase, in firing order.
///
/// Hooks removed after it was taken are still in it: [`Entry::enter`] refuses those.
pub struct Snapshot<H>(pub(crate) Lease<Entries<H>>);

pub(crate) type Entries<H> = Box<[Arc<Entry<H>>]>;

impl<H> Snapshot<H> {
    /// Merges snapshots of one phase into the order that a single registry would have. Also returns,
    /// for each hook, the number of the snapshot that it comes from.
    #[must_use]
    pub fn merged(snapshots: &[Self]) -> (Self, Box<[usize]>) {
        let numbered = snapshots.iter().enumerate();
        let mut entries: Vec<_> = numbered
            .flat_map(|(number, snapshot)| snapshot.entries().iter().map(move |it| (it, number)))
            .collect();
        // Cached keys: a priority may change during the sort.
        entries.sort_by_cached_key(|(entry, _)| entry.state.order_key());
        let (entries, numbers): (Vec<_>, Vec<_>) = entries
            .into_iter()
            .map(|(entry, number)| (Arc::clone(entry), number))
            .unzip();
        (Self::of(entries), numbers.into())
    }

    /// Makes a snapshot of these hooks, in this order.
    #[must_use]
    pub fn of(entries: Vec<Arc<Entry<H>>>) -> Self {
        Self(lease(Arc::new(entries.into())))
    }

    /// The hooks in firing order, to be kept beyond the snapshot.
    #[must_use]
    pub fn entries(&self) -> &[Arc<Entry<H>>] {
        self.0.as_deref().map_or(&[], |entries| entries)
    }

    /// The hooks in firing order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Entry<H>> {
        self.entries().iter().map(|entry| &**entry)
    }

    /// Number of hooks, removed ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// True if it has no hooks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }
}

impl<H: fmt::Debug> fmt::Debug for Snapshot<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.entries()).finish()
    }
}
