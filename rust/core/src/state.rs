use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::error::WaitError;
use crate::phase::Phase;
use crate::placement::Placement;
use crate::sync::{AtomicI64, AtomicU64, Ordering, parker, thread_local};

/// Id of a hook: unique in the process, increasing, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HookId(u64);

impl HookId {
    pub(crate) fn next() -> Self {
        // Not loom's atomic: a counter that only grows needs no model, and loom would want a fresh
        // one for each execution.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        // Relaxed: uniqueness needs only atomicity, nothing is published through the counter.
        Self(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }

    /// The id as an integer.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for HookId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// Life of a hook in one word. All transitions are read-modify-writes of a single location and so
// have one total order. That order proves that a removed hook is never entered: either the entering
// `fetch_add` comes first and the remover finds the thread inside, or the removing `fetch_or` does
// and the entering thread finds the flag.
const REMOVED: u64 = 1;
const DISABLED: u64 = 1 << 1;
/// A thread sleeps until the hook is idle: the last thread out wakes it.
const AWAITED: u64 = 1 << 2;
/// Threads (and recursions) inside the hook: 18 bits.
const ACTIVE: u64 = 1 << 3;
const ACTIVE_MASK: u64 = ((1 << 18) - 1) * ACTIVE;
/// Finished invocations: the upper 43 bits. They wrap (after ten days at ten million calls a
/// second) without touching the rest of the word.
const CALL: u64 = 1 << 21;

thread_local! {
    static INSIDE: Inside = Inside::default();
}

/// Hooks that a thread is inside of, mostly outermost first: waiting for one would deadlock.
#[derive(Clone, Debug, Default)]
pub struct Inside(Rc<RefCell<Vec<HookId>>>);

impl Inside {
    /// Returns the calling thread's. Call it once per walk: a thread-local look-up takes longer
    /// than entering a hook.
    #[must_use]
    pub fn here() -> Self {
        // Thread-locals are gone while a thread ends: it goes on with an empty list.
        INSIDE.try_with(Self::clone).unwrap_or_default()
    }

    #[inline]
    fn push(&self, id: HookId) {
        self.0.borrow_mut().push(id);
    }

    #[inline]
    fn remove(&self, id: HookId) {
        let mut ids = self.0.borrow_mut();
        if ids.last() == Some(&id) {
            ids.pop();
        } else {
            remove_last(&mut ids, id);
        }
    }
}

/// Slow path for coroutines that switch stacks between two hooks: these leave out of order.
#[cold]
fn remove_last(ids: &mut Vec<HookId>, id: HookId) {
    if let Some(at) = ids.iter().rposition(|each| *each == id) {
        ids.remove(at);
    }
}

/// State of one hook, shared by registry and handle. The callback is not in it, so a handle keeps
/// nothing alive.
#[derive(Debug)]
pub(crate) struct HookState {
    pub(crate) id: HookId,
    pub(crate) phase: Phase,
    /// Position among hooks of one priority: `id`, or `-id` for a prepended hook.
    rank: i64,
    /// True if it runs after all other hooks, whatever the priorities.
    last: bool,
    priority: AtomicI64,
    word: AtomicU64,
    /// True once a trace has the hook. Not loom's atomic: it is only ever set, and orders nothing.
    traced: std::sync::atomic::AtomicBool,
}

impl HookState {
    pub(crate) fn new(phase: Phase, placement: Placement, last: bool) -> Self {
        let Placement { priority, prepend } = placement;
        let id = HookId::next();
        // 2^63 ids last for some thousand years.
        let rank = id.get().cast_signed();
        Self {
            id,
            phase,
            rank: if prepend { -rank } else { rank },
            last,
            priority: AtomicI64::new(priority),
            word: AtomicU64::new(0),
            traced: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Sort key: unique, smaller fires first.
    pub(crate) fn order_key(&self) -> (bool, std::cmp::Reverse<i64>, i64) {
        (self.last, std::cmp::Reverse(self.priority()), self.rank)
    }

    pub(crate) fn last(&self) -> bool {
        self.last
    }

    pub(crate) fn prepended(&self) -> bool {
        self.rank < 0
    }

    pub(crate) fn priority(&self) -> i64 {
        // Relaxed: writes and sorts are under the registry's lock; other reads are informational.
        self.priority.load(Ordering::Relaxed)
    }

    pub(crate) fn set_priority(&self, priority: i64) {
        self.priority.store(priority, Ordering::Relaxed);
    }

    /// Acquire: a thread that reads the flag also reads all that the remover did before.
    fn word(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    pub(crate) fn removed(&self) -> bool {
        self.word() & REMOVED != 0
    }

    pub(crate) fn enabled(&self) -> bool {
        self.word() & DISABLED == 0
    }

    pub(crate) fn active(&self) -> bool {
        self.word() & ACTIVE_MASK != 0
    }

    pub(crate) fn calls(&self) -> u64 {
        self.word() / CALL
    }

    pub(crate) fn traced(&self) -> bool {
        self.traced.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(crate) fn mark_traced(&self) {
        self.traced
            .store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Returns true for the call that removed the hook.
    pub(crate) fn mark_removed(&self) -> bool {
        // AcqRel: release orders the remover's earlier writes before the removal; acquire orders the
        // remover after threads that left the hook earlier.
        self.word.fetch_or(REMOVED, Ordering::AcqRel) & REMOVED == 0
    }

    /// Returns true if the flag changed.
    pub(crate) fn set_enabled(&self, enabled: bool) -> bool {
        let before = if enabled {
            self.word.fetch_and(!DISABLED, Ordering::AcqRel)
        } else {
            self.word.fetch_or(DISABLED, Ordering::AcqRel)
        };
        (before & DISABLED == 0) != enabled
    }

    #[inline]
    pub(crate) fn enter<'a>(&'a self, inside: &'a Inside) -> Option<Invocation<'a>> {
        self.enter_unless(REMOVED | DISABLED, inside)
    }

    /// Enters as `enter` does, a disabled hook too.
    pub(crate) fn enter_disabled<'a>(&'a self, inside: &'a Inside) -> Option<Invocation<'a>> {
        self.enter_unless(REMOVED, inside)
    }

    #[inline]
    fn enter_unless<'a>(&'a self, flags: u64, inside: &'a Inside) -> Option<Invocation<'a>> {
        if self.word() & flags != 0 {
            return None;
        }
        // Acquire pairs with the release that last enabled the hook.
        if self.word.fetch_add(ACTIVE, Ordering::Acquire) & flags != 0 {
            self.leave(0);
            return None;
        }
        inside.push(self.id);
        Some(Invocation {
            state: self,
            inside,
        })
    }

    #[inline]
    fn leave(&self, counted: u64) {
        // Release pairs with the acquire in `wait_idle`: the hook's effects happen before the
        // waiter frees its resources.
        let before = self
            .word
            .fetch_add(counted.wrapping_sub(ACTIVE), Ordering::Release);
        if before & AWAITED != 0 && before & ACTIVE_MASK == ACTIVE {
            self.wake_waiters(before.wrapping_add(counted).wrapping_sub(ACTIVE));
        }
    }

    #[cold]
    fn wake_waiters(&self, idle: u64) {
        // Clears the flag, which notifies waiters that the hook was idle. If a thread has entered
        // since, that one clears it when it leaves.
        let _ =
            self.word
                .compare_exchange(idle, idle & !AWAITED, Ordering::AcqRel, Ordering::Relaxed);
        parker().wake();
    }

    /// True if the calling thread is inside the hook.
    pub(crate) fn inside(&self) -> bool {
        Inside::here().0.borrow().contains(&self.id)
    }

    /// Waits until the hook was idle for an instant after this call began.
    pub(crate) fn wait_idle(&self, deadline: Option<Instant>) -> Result<(), WaitError> {
        if self.inside() {
            return Err(WaitError::Inside);
        }
        if !self.active() {
            return Ok(());
        }
        let mut asked = false;
        let idle = parker().wait_while(deadline, || {
            if asked && self.word() & AWAITED == 0 {
                return false;
            }
            asked = true;
            self.word.fetch_or(AWAITED, Ordering::AcqRel) & ACTIVE_MASK != 0
        });
        if idle {
            Ok(())
        } else {
            Err(WaitError::TimedOut)
        }
    }
}

/// Guard of one invocation: dropping it leaves the hook and counts one call.
///
/// Bound to the thread that entered, as [`Inside`] is.
#[derive(Debug)]
pub struct Invocation<'a> {
    state: &'a HookState,
    inside: &'a Inside,
}

impl Drop for Invocation<'_> {
    #[inline]
    fn drop(&mut self) {
        self.inside.remove(self.state.id);
        self.state.leave(CALL);
    }
}

/// Instant at which `timeout` passes; `None` where a clock cannot hold it.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}
