//! Real threads against one registry, every callback counted; guarantees for a single thread.
#![cfg(not(loom))]

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ferrohook_core::{Entry, Handle, HookId, Inside, Phase, Placement, Registry, WaitError};

const PHASE: Phase = Phase::Forward;
/// Run time of one test's threads.
const HAMMERING: Duration = Duration::from_millis(700);
/// Time limit of a test: running longer counts as a deadlock.
const LIMIT: Duration = Duration::from_secs(60);

fn within_limit(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match ended.recv_timeout(LIMIT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("deadlock, or far too slow"),
        // A test that failed is joined to pass its panic on.
        _ => thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// Counts of callbacks made and dropped.
#[derive(Default)]
struct Census {
    made: AtomicUsize,
    dropped: AtomicUsize,
}

impl Census {
    fn left(&self) -> usize {
        self.made.load(Ordering::SeqCst) - self.dropped.load(Ordering::SeqCst)
    }
}

struct Hook {
    census: Arc<Census>,
    /// Set by the owner when no thread can be inside any more.
    freed: Arc<AtomicBool>,
}

impl Hook {
    fn new(census: &Arc<Census>) -> Self {
        census.made.fetch_add(1, Ordering::SeqCst);
        Self {
            census: Arc::clone(census),
            freed: Arc::default(),
        }
    }

    fn run(&self) {
        for _ in 0..8 {
            // Relaxed: the registry has to order the accesses, not this flag.
            assert!(!self.freed.load(Ordering::Relaxed), "ran when it was freed");
            std::hint::spin_loop();
        }
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.census.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

fn register<H>(registry: &Registry<H>, hook: H) -> Handle<H> {
    registry.register(PHASE, hook, Placement::default())
}

fn call<H>(registry: &Registry<H>, mut body: impl FnMut(&Entry<H>)) {
    let inside = Inside::here();
    for entry in registry.snapshot(PHASE).iter() {
        if let Some(_invocation) = entry.enter(&inside) {
            body(entry);
        }
    }
}

/// Pseudo-random numbers without a dependency.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// One call and its assertions.
fn checked_call(registry: &Registry<Hook>, calls: &AtomicUsize) {
    let mut fired = HashSet::new();
    let mut last: Option<(i64, HookId)> = None;
    call(registry, |entry| {
        assert!(fired.insert(entry.id()), "fired twice in one walk");
        // Nothing is prepended or moved here: higher priorities first, then older hooks.
        let key = (-entry.priority(), entry.id());
        assert!(last.is_none_or(|last| last < key), "out of order");
        last = Some(key);
        entry.hook().run();
        calls.fetch_add(1, Ordering::Relaxed);
    });
}

/// Registers hooks and ends each in one of the possible ways. Returns the number of times they
/// fired.
fn churn(registry: &Registry<Hook>, census: &Arc<Census>, until: Instant, seed: u64) -> u64 {
    let mut state = seed;
    let mut calls = 0;
    let mut own = Vec::new();
    while Instant::now() < until {
        // Sometimes a list too long to be purged at every removal.
        for _ in 0..random(&mut state) % 100 {
            let hook = Hook::new(census);
            let freed = Arc::clone(&hook.freed);
            let placement = Placement {
                priority: (random(&mut state) % 5).cast_signed() - 2,
                prepend: false,
            };
            own.push((registry.register(PHASE, hook, placement), freed));
        }
        for (handle, freed) in own.drain(..) {
            match random(&mut state) % 4 {
                0 => assert!(handle.remove()),
                1 => {
                    handle.set_enabled(false);
                    handle.wait_idle(None).unwrap();
                    freed.store(true, Ordering::Relaxed);
                    handle.remove();
                }
                _ => {
                    assert!(handle.remove(), "nobody else removes it");
                    handle.wait_idle(None).unwrap();
                    freed.store(true, Ordering::Relaxed);
                }
            }
            handle.wait_idle(None).unwrap();
            calls += handle.calls();
        }
    }
    calls
}

#[test]
fn hammered_by_callers_and_churners() {
    within_limit(|| {
        let registry = Arc::new(Registry::<Hook>::new());
        let census = Arc::new(Census::default());
        let calls = Arc::new(AtomicUsize::new(0));
        let stays = register(&registry, Hook::new(&census));
        let barrier = Arc::new(Barrier::new(6));
        let until = Instant::now() + HAMMERING;

        let callers = [(), ()].map(|()| {
            let (registry, barrier, calls) = (registry.clone(), barrier.clone(), calls.clone());
            thread::spawn(move || {
                barrier.wait();
                while Instant::now() < until {
                    checked_call(&registry, &calls);
                }
            })
        });
        let churners = [1, 2].map(|seed| {
            let (registry, barrier, census) = (registry.clone(), barrier.clone(), census.clone());
            thread::spawn(move || {
                barrier.wait();
                churn(&registry, &census, until, seed)
            })
        });
        let quiescer = thread::spawn({
            let (registry, barrier) = (registry.clone(), barrier.clone());
            move || {
                barrier.wait();
                while Instant::now() < until {
                    registry.quiesce(None).unwrap();
                    let soon = registry.quiesce(Some(Duration::from_micros(10)));
                    assert_ne!(soon, Err(WaitError::Inside));
                }
            }
        });
        barrier.wait();
        while Instant::now() < until {
            // A snapshot does not change, whatever the registry does.
            let snapshot = registry.snapshot(PHASE);
            let ids: Vec<_> = snapshot.iter().map(Entry::id).collect();
            thread::sleep(Duration::from_millis(1));
            assert!(snapshot.iter().map(Entry::id).eq(ids));
        }

        for caller in callers {
            caller.join().unwrap();
        }
        quiescer.join().unwrap();
        let counted: u64 = churners.map(|churner| churner.join().unwrap()).iter().sum();
        assert_eq!(
            counted + stays.calls(),
            calls.load(Ordering::Relaxed) as u64
        );
        // Only the hook that stayed is left.
        assert_eq!(census.left(), 1);
        assert_eq!(registry.snapshot(PHASE).len(), 1);
        stays.remove();
        assert!(registry.idle());
        assert_eq!(census.left(), 0);
    });
}

#[test]
fn hammered_with_disabling() {
    within_limit(|| {
        let registry = Arc::new(Registry::<Hook>::new());
        let census = Arc::new(Census::default());
        let hook = Hook::new(&census);
        let paused = hook.freed.clone();
        let handle = register(&registry, hook);
        let barrier = Arc::new(Barrier::new(4));
        let until = Instant::now() + HAMMERING;
        let callers = [(), (), ()].map(|()| {
            let (registry, barrier) = (registry.clone(), barrier.clone());
            thread::spawn(move || {
                barrier.wait();
                while Instant::now() < until {
                    call(&registry, |entry| entry.hook().run());
                }
            })
        });
        barrier.wait();
        while Instant::now() < until {
            handle.set_enabled(false);
            handle.wait_idle(None).unwrap();
            let calls = handle.calls();
            paused.store(true, Ordering::Relaxed);
            thread::yield_now();
            assert_eq!(handle.calls(), calls);
            paused.store(false, Ordering::Relaxed);
            handle.set_enabled(true);
            thread::yield_now();
        }
        for caller in callers {
            caller.join().unwrap();
        }
        assert!(handle.enabled());
    });
}

#[test]
fn removed_by_many_from_inside_and_outside() {
    within_limit(|| {
        let census = Arc::new(Census::default());
        for round in 0..500 {
            let registry = Arc::new(Registry::<Hook>::new());
            let handle = Arc::new(register(&registry, Hook::new(&census)));
            let survivor = register(&registry, Hook::new(&census));
            let barrier = Arc::new(Barrier::new(4));
            let removers = [true, true, false, false].map(|inside| {
                let (registry, handle) = (registry.clone(), handle.clone());
                let barrier = barrier.clone();
                thread::spawn(move || {
                    let mut removals = 0;
                    barrier.wait();
                    if inside {
                        call(&registry, |entry| {
                            if entry.id() == handle.id() {
                                removals += usize::from(handle.remove());
                                assert_eq!(handle.wait_idle(None), Err(WaitError::Inside));
                            }
                        });
                    } else {
                        removals += usize::from(handle.remove());
                        handle.wait_idle(None).unwrap();
                    }
                    removals
                })
            });
            let removals: usize = removers.map(|remover| remover.join().unwrap()).iter().sum();
            assert_eq!(removals, 1);
            assert_eq!(registry.snapshot(PHASE).len(), 1);
            assert_eq!(survivor.calls(), 2);
            assert_eq!(census.left(), 1);
            if round % 2 == 0 {
                registry.clear(None);
                assert_eq!(census.left(), 0);
            }
            drop(registry);
            assert_eq!(census.left(), 0);
        }
    });
}

#[test]
fn registered_by_many_none_is_lost() {
    within_limit(|| {
        const EACH: usize = 2_000;
        let registry = Arc::new(Registry::<Hook>::new());
        let census = Arc::new(Census::default());
        let barrier = Arc::new(Barrier::new(4));
        let registrars = [(), (), ()].map(|()| {
            let (registry, census, barrier) = (registry.clone(), census.clone(), barrier.clone());
            thread::spawn(move || {
                barrier.wait();
                let handles: Vec<_> = (0..EACH)
                    .map(|_| register(&registry, Hook::new(&census)))
                    .collect();
                handles.iter().map(Handle::id).collect::<Vec<_>>()
            })
        });
        barrier.wait();
        let mut longest = 0;
        while longest < 3 * EACH {
            let snapshot = registry.snapshot(PHASE);
            assert!(snapshot.len() >= longest, "a hook that was there is gone");
            assert!(snapshot.iter().map(Entry::id).is_sorted());
            longest = snapshot.len();
        }
        let mut ids = HashSet::new();
        for registrar in registrars {
            let own = registrar.join().unwrap();
            assert!(own.is_sorted());
            ids.extend(own);
        }
        assert_eq!(ids.len(), 3 * EACH);
        registry.clear(Some(PHASE));
        assert_eq!(census.left(), 0);
    });
}

#[test]
fn a_million_leave_nothing() {
    within_limit(|| {
        const MILLION: usize = 1_000_000;
        let registry = Registry::<Hook>::new();
        let census = Arc::new(Census::default());
        let stays = register(&registry, Hook::new(&census));
        for _ in 0..MILLION / 2 {
            register(&registry, Hook::new(&census)).remove();
        }
        assert_eq!(census.left(), 1);

        let handles: Vec<_> = (0..MILLION / 2)
            .map(|_| register(&registry, Hook::new(&census)))
            .collect();
        // The oldest, the newest and those between them, with a snapshot on the way.
        let (old, new) = handles.split_at(MILLION / 4);
        for handle in old {
            assert!(handle.remove());
        }
        assert_eq!(registry.snapshot(PHASE).len(), 1 + MILLION / 4);
        for handle in new.iter().rev() {
            assert!(handle.remove());
        }

        assert_eq!(census.made.load(Ordering::SeqCst), 1 + MILLION);
        assert_eq!(census.left(), 1);
        assert_eq!(registry.snapshot(PHASE).len(), 1);
        stays.remove();
        assert_eq!(census.left(), 0);
        assert!(registry.idle());
    });
}

#[test]
fn a_short_list_frees_at_once() {
    let registry = Registry::<Hook>::new();
    let census = Arc::new(Census::default());
    let handles: Vec<_> = (0..64)
        .map(|_| register(&registry, Hook::new(&census)))
        .collect();
    drop(registry.snapshot(PHASE));
    for (removed, handle) in handles.iter().enumerate() {
        handle.remove();
        assert_eq!(census.left(), 63 - removed);
    }
}

#[test]
fn a_call_under_way_keeps_the_callback_it_is_in() {
    let registry = Registry::<Hook>::new();
    let census = Arc::new(Census::default());
    let handle = register(&registry, Hook::new(&census));
    call(&registry, |entry| {
        handle.remove();
        assert_eq!(census.left(), 1);
        entry.hook().run();
    });
    assert_eq!(census.left(), 0);
}

#[test]
fn a_handle_outlives_the_registry() {
    let registry = Registry::<Hook>::new();
    let census = Arc::new(Census::default());
    let handle = register(&registry, Hook::new(&census));
    let snapshot = registry.snapshot(PHASE);
    drop(registry);
    assert!(!handle.removed());
    assert_eq!(census.left(), 1, "the snapshot still walks it");
    handle.set_priority(1);
    handle.set_enabled(false);
    assert!(handle.remove() && !handle.remove());
    let inside = Inside::here();
    assert!(snapshot.iter().all(|entry| entry.enter(&inside).is_none()));
    assert_eq!(handle.wait_idle(None), Ok(()));
    drop(snapshot);
    assert_eq!(census.left(), 0);
    assert!(format!("{handle:?}").contains("removed: true"));
}

#[test]
fn waiting_from_inside_is_refused() {
    within_limit(|| {
        let registry = Registry::new();
        let handle = register(&registry, ());
        let other = register(&registry, ());
        let mut fired = 0;
        call(&registry, |entry| {
            fired += 1;
            let (own, others) = if entry.id() == handle.id() {
                (&handle, &other)
            } else {
                (&other, &handle)
            };
            assert_eq!(own.wait_idle(None), Err(WaitError::Inside));
            assert_eq!(others.wait_idle(None), Ok(()));
            assert_eq!(registry.quiesce(None), Err(WaitError::Inside));
            own.remove();
            // Purged, and still counted as running.
            assert_eq!(registry.quiesce(None), Err(WaitError::Inside));
            // Below another call it is still inside.
            call(&registry, |_| {
                assert_eq!(own.wait_idle(None), Err(WaitError::Inside));
            });
        });
        assert_eq!(fired, 2);
        assert_eq!(handle.wait_idle(None), Ok(()));
        assert_eq!(registry.quiesce(None), Ok(()));
    });
}

/// A thread that stays inside the hooks of `registry` until the sender is dropped.
fn stay_inside<H: Send + Sync + 'static>(
    registry: &Arc<Registry<H>>,
) -> (mpsc::Sender<()>, thread::JoinHandle<()>) {
    let (entered, inside) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    let registry = Arc::clone(registry);
    let thread = thread::spawn(move || {
        call(&registry, |_| {
            entered.send(()).unwrap();
            let _ = left.recv();
        });
    });
    inside.recv().unwrap();
    (leave, thread)
}

#[test]
fn a_timeout_ends_waiting() {
    within_limit(|| {
        let registry = Arc::new(Registry::new());
        let handle = register(&registry, ());
        let (leave, thread) = stay_inside(&registry);
        for timeout in [Duration::ZERO, Duration::from_millis(20)] {
            let started = Instant::now();
            assert_eq!(handle.wait_idle(Some(timeout)), Err(WaitError::TimedOut));
            assert_eq!(registry.quiesce(Some(timeout)), Err(WaitError::TimedOut));
            assert!(started.elapsed() >= 2 * timeout);
        }
        handle.remove();
        let still = registry.quiesce(Some(Duration::ZERO));
        assert_eq!(still, Err(WaitError::TimedOut));
        drop(leave);
        // A timeout too long for a clock is no limit.
        assert_eq!(handle.wait_idle(Some(Duration::MAX)), Ok(()));
        assert_eq!(registry.quiesce(Some(Duration::ZERO)), Ok(()));
        thread.join().unwrap();
    });
}

#[test]
fn one_moment_without_a_thread_is_enough() {
    within_limit(|| {
        // Waiters that are asleep by then (only time makes that likely) must not miss the idle
        // instant between the two stays. There are more of them than can wake up in it.
        let woken = (1..=3).any(|attempt| {
            let registry = Arc::new(Registry::new());
            let handle = Arc::new(register(&registry, ()));
            let (entered, inside) = mpsc::channel();
            let (leave, left) = mpsc::channel::<()>();
            let thread = thread::spawn(move || {
                let inside = Inside::here();
                let snapshot = registry.snapshot(PHASE);
                for stay in [Duration::from_millis(100 * attempt), LIMIT] {
                    for entry in snapshot.iter() {
                        let _invocation = entry.enter(&inside);
                        entered.send(()).unwrap();
                        let _ = left.recv_timeout(stay);
                    }
                }
            });
            inside.recv().unwrap();
            let waiters = [(); 8].map(|()| {
                let handle = handle.clone();
                thread::spawn(move || handle.wait_idle(Some(Duration::from_secs(1))))
            });
            let waited = waiters.map(|waiter| waiter.join().unwrap());
            drop(leave);
            thread.join().unwrap();
            waited.iter().all(Result::is_ok)
        });
        assert!(woken);
    });
}

#[test]
fn quiesce_from_inside_does_not_wait_for_others_first() {
    within_limit(|| {
        let registry = Arc::new(Registry::new());
        let first = register(&registry, ());
        let (leave, thread) = stay_inside(&registry);
        first.set_enabled(false);
        register(&registry, ());
        call(&registry, |_| {
            let refused = registry.quiesce(Some(Duration::from_secs(1)));
            assert_eq!(refused, Err(WaitError::Inside));
        });
        drop(leave);
        thread.join().unwrap();
    });
}

#[test]
fn hooks_may_be_left_in_any_order() {
    within_limit(|| {
        let registry = Registry::new();
        let handles = [(); 3].map(|()| register(&registry, ()));
        let snapshot = registry.snapshot(PHASE);
        let here = Inside::here();
        let mut inside: Vec<_> = snapshot.iter().map(|entry| entry.enter(&here)).collect();
        // As coroutines that switch stacks within a thread do.
        for left in [1, 0, 2] {
            inside[left] = None;
            for (handle, inside) in handles.iter().zip(&inside) {
                let refused = inside.as_ref().map_or(Ok(()), |_| Err(WaitError::Inside));
                assert_eq!(handle.wait_idle(Some(Duration::ZERO)), refused);
            }
        }
    });
}

struct AtThreadExit(Arc<Registry<Hook>>);

impl Drop for AtThreadExit {
    fn drop(&mut self) {
        call(&self.0, |entry| entry.hook().run());
        self.0.quiesce(None).unwrap();
    }
}

thread_local! {
    static AT_EXIT: RefCell<Option<AtThreadExit>> = const { RefCell::new(None) };
}

#[test]
fn hooks_fire_while_a_thread_ends() {
    within_limit(|| {
        let registry = Arc::new(Registry::<Hook>::new());
        let handle = register(&registry, Hook::new(&Arc::default()));
        for first in [true, false] {
            let registry = registry.clone();
            let thread = thread::spawn(move || {
                // Destroyed in the reverse order of their first use: either goes before the other.
                let arm = || AT_EXIT.set(Some(AtThreadExit(registry.clone())));
                if first {
                    arm();
                }
                call(&registry, |entry| entry.hook().run());
                arm();
            });
            thread.join().unwrap();
        }
        assert!(handle.calls() >= 4);
        assert_eq!(handle.wait_idle(Some(Duration::ZERO)), Ok(()));
    });
}

/// Callback whose destructor uses its registry.
struct Meddler {
    registry: Weak<Registry<Meddler>>,
    handles: Arc<Mutex<Vec<Handle<Meddler>>>>,
    meddles: bool,
    ends: Arc<AtomicUsize>,
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.ends.fetch_add(1, Ordering::SeqCst);
        let handles = std::mem::take(&mut *self.handles.lock().unwrap());
        for handle in handles {
            handle.remove();
            handle.wait_idle(None).unwrap();
            handle.set_priority(3);
        }
        if let Some(registry) = self.registry.upgrade().filter(|_| self.meddles) {
            let next = Meddler {
                registry: self.registry.clone(),
                handles: Arc::default(),
                meddles: false,
                ends: self.ends.clone(),
            };
            register(&registry, next);
            call(&registry, |_| ());
            registry.quiesce(None).unwrap();
            registry.clear(None);
        }
    }
}

#[test]
fn a_callback_that_ends_may_use_the_registry() {
    // Ways to free the callback: each takes the locks in another way.
    type Freeing = fn(&Registry<Meddler>, &Handle<Meddler>);
    let freeings: [Freeing; 4] = [
        |_, handle| assert!(handle.remove()),
        |registry, _| registry.clear(Some(PHASE)),
        |registry, handle| {
            call(registry, |_| {
                handle.remove();
            });
        },
        |registry, handle| {
            let snapshot = registry.snapshot(PHASE);
            handle.remove();
            drop(snapshot);
        },
    ];
    for free in freeings {
        within_limit(move || {
            let registry = Arc::new(Registry::new());
            let ends = Arc::new(AtomicUsize::new(0));
            let handles = Arc::new(Mutex::new(Vec::new()));
            let meddler = |meddles| Meddler {
                registry: Arc::downgrade(&registry),
                handles: handles.clone(),
                meddles,
                ends: ends.clone(),
            };
            let handle = register(&registry, meddler(true));
            let other = register(&registry, meddler(false));
            handles.lock().unwrap().push(other);
            free(&registry, &handle);
            assert_eq!(ends.load(Ordering::SeqCst), 3);
            assert!(registry.idle());
            // Dropping the registry may free it.
            let last = register(&registry, meddler(true));
            handles.lock().unwrap().push(last);
            drop(registry);
            assert_eq!(ends.load(Ordering::SeqCst), 4);
        });
    }
}

#[test]
fn a_copy_that_fails_leaves_nothing() {
    let registry = Registry::<Hook>::new();
    let census = Arc::new(Census::default());
    let handles = [(); 3].map(|()| register(&registry, Hook::new(&census)));
    let mut copies = 0;
    let failed = registry.fork(|_, _, _| {
        copies += 1;
        if copies == 3 {
            Err("no more")
        } else {
            Ok(Hook::new(&census))
        }
    });
    assert_eq!(failed.err(), Some("no more"));
    assert_eq!(census.left(), 3);
    // `copy` may call anything, the registry itself included.
    let fork = registry.fork(|_, _, _| {
        handles[2].remove();
        call(&registry, |_| ());
        Ok::<_, ()>(Hook::new(&census))
    });
    assert!(fork.is_ok_and(|fork| fork.snapshot(PHASE).len() >= 2));
    drop(registry);
    assert_eq!(census.left(), 0);
}
