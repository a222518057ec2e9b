use std::fmt;
use std::sync::Arc;

use crate::phase::Phase;
use crate::state::{HookId, HookState, Inside, Invocation};
use crate::sync::{Lease, lease};

/// One registered hook: its callback and where it stands.
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

    /// The hook's number.
    #[must_use]
    pub fn id(&self) -> HookId {
        self.state.id
    }

    /// The phase that the hook is registered for.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.state.phase
    }

    /// The priority that the hook has now; higher fires first.
    #[must_use]
    pub fn priority(&self) -> i64 {
        self.state.priority()
    }

    /// Whether it was registered by [`Registry::register_last`](crate::Registry::register_last).
    #[must_use]
    pub fn last(&self) -> bool {
        self.state.last()
    }

    /// Whether the hook was removed.
    #[must_use]
    pub fn removed(&self) -> bool {
        self.state.removed()
    }

    /// Whether the hook fires when its turn comes.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.state.enabled()
    }

    /// How many invocations have ended so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state.calls()
    }

    /// Enters the hook, unless it was removed or disabled: to be asked right before each
    /// invocation, with the answer kept until the callback has returned. `inside` is the calling
    /// thread's.
    #[must_use]
    #[inline]
    pub fn enter<'a>(&'a self, inside: &'a Inside) -> Option<Invocation<'a>> {
        self.state.enter(inside)
    }

    /// Keeps the hook and its place, and skips it from now on. Returns whether it was this call
    /// that disabled it.
    pub fn disable(&self) -> bool {
        self.state.set_enabled(false)
    }
}

/// The immutable list of hooks that one call walks for one phase, in firing order.
///
/// May hold hooks that were removed after it was taken: [`Entry::enter`] tells.
pub struct Snapshot<H>(pub(crate) Lease<Entries<H>>);

pub(crate) type Entries<H> = Box<[Arc<Entry<H>>]>;

impl<H> Snapshot<H> {
    /// The hooks of several snapshots of one phase in the order that they would have in a single
    /// registry.
    #[must_use]
    pub fn merged(snapshots: &[Self]) -> Self {
        let mut entries: Vec<_> = snapshots.iter().flat_map(Self::entries).cloned().collect();
        // Cached: a priority may change while this sorts.
        entries.sort_by_cached_key(|entry| entry.state.order_key());
        Self(lease(Arc::new(entries.into())))
    }

    pub(crate) fn entries(&self) -> &[Arc<Entry<H>>] {
        self.0.as_deref().map_or(&[], |entries| entries)
    }

    /// The hooks in firing order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Entry<H>> {
        self.entries().iter().map(|entry| &**entry)
    }

    /// How many hooks the snapshot holds, removed ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// Whether it holds none.
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
