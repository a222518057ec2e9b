use std::sync::Arc;

use crate::phase::Phase;
use crate::snapshot::{Entries, Entry};
use crate::state::HookState;
use crate::sync::{AtomicU64, Lease, Mutex, Ordering, Slot, lease};
use crate::work::Work;

/// Up to this length a list is purged at every removal, which frees the callback at once. A longer
/// list is purged when half of it is removed, so removal stays amortised constant-time.
const ALWAYS_PURGED: usize = 64;

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
pub(crate) struct Garbage<H> {
    _entries: Vec<Arc<Entry<H>>>,
    _snapshot: Option<Arc<Entries<H>>>,
}

impl<H> Shared<H> {
    pub(crate) fn new() -> Self {
        Self {
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
        }
    }

    /// The hooks of `phase` as they are now, in firing order.
    #[inline]
    pub(crate) fn snapshot(&self, phase: Phase) -> Lease<Entries<H>> {
        let hooks = self.hooks(phase);
        hooks.published.load().unwrap_or_else(|| hooks.publish())
    }

    /// Hooks of `phase`, removed ones included, that a thread is inside of.
    pub(crate) fn active(&self, phase: Phase) -> Vec<Arc<HookState>> {
        self.hooks(phase).list.lock().active()
    }

    /// Visits each callback of `phase`, under the lock.
    pub(crate) fn visit<E>(
        &self,
        phase: Phase,
        visit: &mut impl FnMut(&H) -> Result<(), E>,
    ) -> Result<(), E> {
        let list = self.hooks(phase).list.lock();
        list.entries.iter().try_for_each(|entry| visit(&entry.hook))
    }

    fn hooks(&self, phase: Phase) -> &PhaseHooks<H> {
        &self.phases[phase as usize]
    }

    #[inline]
    pub(crate) fn work(&self) -> Work {
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

    pub(crate) fn push(&self, entry: Arc<Entry<H>>) {
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

    pub(crate) fn clear(&self, phase: Phase, doomed: impl Fn(&HookState) -> bool) -> Garbage<H> {
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
