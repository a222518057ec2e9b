use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::WaitError;
use crate::handle::{Handle, deadline};
use crate::phase::Phase;
use crate::snapshot::{Entries, Entry, Snapshot};
use crate::state::HookState;
use crate::sync::{AtomicU64, Lease, Mutex, Ordering, Slot, lease};
use crate::work::{self, Watch, Work};

/// Up to this length a list is purged at every removal, which frees the callback at once. A longer
/// list is purged when half of it is removed, so removal stays amortised constant-time.
const ALWAYS_PURGED: usize = 64;

/// Position of a hook among those of its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Higher fires first.
    pub priority: i64,
    /// Ahead of all others of its priority, instead of behind them.
    pub prepend: bool,
}

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
            shared: Arc::new(Shared {
                phases: std::array::from_fn(|_| PhaseHooks {
                    list: Mutex::new(List {
                        entries: Vec::new(),
                        removed: 0,
                        sorted: true,
                        asked: false,
                        departing: Vec::new(),
                    }),
                    published: Slot::empty(),
                }),
                work: AtomicU64::new(0),
            }),
        }
    }

    /// Adds `hook` to `phase`. Phases that have begun do not fire it.
    pub fn register(&self, phase: Phase, hook: H, placement: Placement) -> Handle<H> {
        self.push(HookState::new(phase, placement, false), hook)
    }

    /// Adds a hook that stays behind all others, whatever their priorities, until its handle
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

    /// Has calls measure how long the module runs.
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
        let hooks = self.shared.hooks(phase);
        Snapshot(hooks.published.load().unwrap_or_else(|| hooks.publish()))
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
            // Each prepended hook goes ahead of the others: registered last to first, they keep
            // their order.
            let (prepended, appended): (Vec<_>, Vec<_>) =
                live.partition(|entry| entry.state.prepended());
            for entry in appended.into_iter().chain(prepended.into_iter().rev()) {
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
                .flat_map(|phase| self.shared.hooks(phase).list.lock().active())
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
        for phase in Phase::ALL {
            for entry in &self.shared.hooks(phase).list.lock().entries {
                visit(&entry.hook)?;
            }
        }
        Ok(())
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

/// State of a registry; handles hold a weak reference to it.
pub(crate) struct Shared<H> {
    phases: [PhaseHooks<H>; Phase::ALL.len()],
    /// See [`work`]. The bit of a phase changes only under that phase's lock.
    pub(crate) work: AtomicU64,
}

struct PhaseHooks<H> {
    list: Mutex<List<H>>,
    /// Emptied by every change and filled by the second call after it, both under the lock. A hook
    /// that lives for one call is not worth filling it.
    published: Slot<Entries<H>>,
}

struct List<H> {
    entries: Vec<Arc<Entry<H>>>,
    /// Number of removed entries, for deciding when to purge.
    removed: usize,
    sorted: bool,
    /// True if a snapshot was taken since the last change.
    asked: bool,
    /// Hooks purged while a thread was inside: `quiesce` still waits for them.
    departing: Vec<Arc<HookState>>,
}

/// Entries and snapshot that a change took out. Drop it after the lock is released: a callback's
/// destructor may call back into the registry.
#[must_use]
struct Garbage<H> {
    _entries: Vec<Arc<Entry<H>>>,
    _snapshot: Option<Arc<Entries<H>>>,
}

impl<H> Shared<H> {
    fn hooks(&self, phase: Phase) -> &PhaseHooks<H> {
        &self.phases[phase as usize]
    }

    fn work(&self) -> Work {
        // Acquire pairs with the releases that change it.
        Work(self.work.load(Ordering::Acquire))
    }

    /// Call under the phase's lock.
    fn set_occupied(&self, phase: Phase, occupied: bool) {
        if occupied {
            self.work.fetch_or(phase.bit(), Ordering::Release);
        } else {
            self.work.fetch_and(!phase.bit(), Ordering::Release);
        }
    }

    fn push(&self, entry: Arc<Entry<H>>) {
        let phase = entry.state.phase;
        let hooks = self.hooks(phase);
        let outdated;
        {
            let mut list = hooks.list.lock();
            list.sorted &= list
                .entries
                .last()
                .is_none_or(|last| last.state.order_key() < entry.state.order_key());
            list.entries.push(entry);
            self.set_occupied(phase, true);
            outdated = hooks.outdate(&mut list);
        }
        drop(outdated);
    }

    pub(crate) fn note_removal(&self, phase: Phase) {
        let hooks = self.hooks(phase);
        let garbage;
        {
            let mut list = hooks.list.lock();
            list.removed += 1;
            let len = list.entries.len();
            if len > ALWAYS_PURGED && list.removed * 2 < len {
                return;
            }
            garbage = Garbage {
                _entries: list.purge(),
                _snapshot: hooks.outdate(&mut list),
            };
            self.set_occupied(phase, !list.entries.is_empty());
        }
        drop(garbage);
    }

    pub(crate) fn set_priority(&self, state: &HookState, priority: i64) {
        let hooks = self.hooks(state.phase);
        let outdated;
        {
            let mut list = hooks.list.lock();
            state.set_priority(priority);
            list.sorted = false;
            outdated = hooks.outdate(&mut list);
        }
        drop(outdated);
    }

    fn clear(&self, phase: Phase, doomed: impl Fn(&HookState) -> bool) -> Garbage<H> {
        let hooks = self.hooks(phase);
        let mut list = hooks.list.lock();
        for entry in list.entries.iter().filter(|entry| doomed(&entry.state)) {
            entry.state.mark_removed();
        }
        let garbage = Garbage {
            _entries: list.purge(),
            _snapshot: hooks.outdate(&mut list),
        };
        self.set_occupied(phase, !list.entries.is_empty());
        garbage
    }
}

impl<H> PhaseHooks<H> {
    /// Call under the list's lock, after a change; drop the result once the lock is released.
    #[must_use]
    fn outdate(&self, list: &mut List<H>) -> Option<Arc<Entries<H>>> {
        list.asked = false;
        self.published.swap(None)
    }

    #[cold]
    fn publish(&self) -> Lease<Entries<H>> {
        let mut list = self.list.lock();
        // Another thread may have published meanwhile.
        if let Some(snapshot) = self.published.load() {
            return snapshot;
        }
        if !list.sorted {
            // Nearly sorted: linear time for a merge sort of runs.
            list.entries.sort_by_key(|entry| entry.state.order_key());
            list.sorted = true;
        }
        let live = list.entries.iter().filter(|entry| !entry.removed());
        let entries: Arc<Entries<H>> = Arc::new(live.cloned().collect());
        if list.asked {
            self.published.swap(Some(Arc::clone(&entries)));
        }
        list.asked = true;
        lease(entries)
    }
}

impl<H> List<H> {
    /// Takes the removed entries out.
    fn purge(&mut self) -> Vec<Arc<Entry<H>>> {
        let garbage: Vec<_> = self
            .entries
            .extract_if(.., |entry| entry.removed())
            .collect();
        self.removed = 0;
        self.departing.retain(|state| state.active());
        self.departing.extend(
            garbage
                .iter()
                .map(|entry| &entry.state)
                .filter(|state| state.active())
                .cloned(),
        );
        // A burst of a million hooks must not pin its memory.
        if self.entries.capacity() > 4 * self.entries.len() {
            self.entries.shrink_to(2 * self.entries.len());
        }
        garbage
    }

    fn active(&self) -> Vec<Arc<HookState>> {
        self.entries
            .iter()
            .map(|entry| &entry.state)
            .chain(&self.departing)
            .filter(|state| state.active())
            .cloned()
            .collect()
    }
}
