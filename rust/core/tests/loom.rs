//! Every interleaving, up to a bound of preemptions, of two or three threads with one registry.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ferrohook-core --test loom --release`
#![cfg(loom)]

use std::sync::Arc;

use ferrohook_core::{Entry, Handle, Inside, Phase, Placement, Registry};
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread::{self, JoinHandle};

const PHASE: Phase = Phase::Forward;

/// Callback: a token whose owners can be counted.
type Token = Arc<()>;

/// Three preemptions find the known bugs of such protocols; without a bound a model takes hours.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    explore_up_to(3, model);
}

fn explore_up_to(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn registry() -> Arc<Registry<Token>> {
    Arc::new(Registry::new())
}

fn register(registry: &Registry<Token>) -> Handle<Token> {
    registry.register(PHASE, Token::default(), Placement::default())
}

fn spawn<T: 'static>(work: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    thread::spawn(work)
}

/// One call: walks the snapshot and runs `body` inside of each hook.
fn call(registry: &Registry<Token>, mut body: impl FnMut(&Entry<Token>)) {
    let inside = Inside::here();
    for entry in registry.snapshot(PHASE).iter() {
        if let Some(_invocation) = entry.enter(&inside) {
            body(entry);
        }
    }
}

fn ids(registry: &Registry<Token>) -> Vec<u64> {
    let snapshot = registry.snapshot(PHASE);
    snapshot.iter().map(|entry| entry.id().get()).collect()
}

/// Resource that a hook uses and its owner frees. Relaxed throughout, so only the registry can
/// order the accesses.
#[derive(Default)]
struct Resource {
    freed: AtomicBool,
    uses: AtomicUsize,
}

impl Resource {
    fn make() -> Arc<Self> {
        Arc::default()
    }

    fn use_it(&self) {
        assert!(
            !self.freed.load(Ordering::Relaxed),
            "used after it was freed"
        );
        self.uses.fetch_add(1, Ordering::Relaxed);
        assert!(!self.freed.load(Ordering::Relaxed), "freed while in use");
    }

    /// `calls`: the hook's counter.
    fn free(&self, calls: u64) {
        let uses = self.uses.load(Ordering::Relaxed);
        assert_eq!(uses as u64, calls, "freed before a use of it was seen");
        self.freed.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nobody_enters_after_remove_returned() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let removed = Arc::new(AtomicBool::new(false));
        let caller = spawn({
            let (registry, removed) = (registry.clone(), removed.clone());
            move || {
                for entry in registry.snapshot(PHASE).iter() {
                    let too_late = removed.load(Ordering::Acquire);
                    let entered = entry.enter(&Inside::here()).is_some();
                    assert!(!(too_late && entered));
                }
            }
        });
        assert!(handle.remove());
        removed.store(true, Ordering::Release);
        caller.join().unwrap();
        assert!(registry.snapshot(PHASE).is_empty());
    });
}

#[test]
fn who_sees_the_removal_sees_what_came_before() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let before = Arc::new(AtomicBool::new(false));
        let caller = spawn({
            let (registry, before) = (registry.clone(), before.clone());
            move || {
                for entry in registry.snapshot(PHASE).iter() {
                    assert!(!entry.removed() || before.load(Ordering::Relaxed));
                }
            }
        });
        before.store(true, Ordering::Relaxed);
        handle.remove();
        caller.join().unwrap();
    });
}

#[test]
fn who_left_does_not_speak_for_who_entered_since() {
    // Four threads: a third preemption takes minutes.
    explore_up_to(2, || {
        let registry = registry();
        let handle = Arc::new(register(&registry));
        let resource = Resource::make();
        let callers = [(), ()].map(|()| {
            let (registry, resource) = (registry.clone(), resource.clone());
            spawn(move || {
                call(&registry, |_| {
                    // Costs no preemption, of which two are left to the registry.
                    thread::yield_now();
                    resource.use_it();
                });
            })
        });
        // The first to leave wakes later waiters too.
        let other = spawn({
            let handle = handle.clone();
            move || handle.wait_idle(None).unwrap()
        });
        handle.remove();
        handle.wait_idle(None).unwrap();
        resource.free(handle.calls());
        for caller in callers {
            caller.join().unwrap();
        }
        other.join().unwrap();
    });
}

#[test]
fn waiting_outlasts_two_callers() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let resource = Resource::make();
        let callers = [(), ()].map(|()| {
            let (registry, resource) = (registry.clone(), resource.clone());
            spawn(move || call(&registry, |_| resource.use_it()))
        });
        handle.remove();
        handle.wait_idle(None).unwrap();
        resource.free(handle.calls());
        for caller in callers {
            caller.join().unwrap();
        }
    });
}

#[test]
fn two_waiters_are_both_woken() {
    explore(|| {
        let registry = registry();
        let handle = Arc::new(register(&registry));
        let resource = Resource::make();
        let caller = spawn({
            let (registry, resource) = (registry.clone(), resource.clone());
            move || call(&registry, |_| resource.use_it())
        });
        let other = spawn({
            let handle = handle.clone();
            move || {
                handle.remove();
                handle.wait_idle(None).unwrap();
            }
        });
        handle.remove();
        handle.wait_idle(None).unwrap();
        resource.free(handle.calls());
        caller.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_hook_that_stays_does_not_keep_a_waiter() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let callers = [(), ()].map(|()| {
            let registry = registry.clone();
            spawn(move || call(&registry, |_| ()))
        });
        // loom reports a deadlock if a waiter misses the idle instant.
        handle.wait_idle(None).unwrap();
        for caller in callers {
            caller.join().unwrap();
        }
        assert_eq!(handle.calls(), 2);
    });
}

#[test]
fn a_recursive_call_keeps_the_waiter() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let resource = Resource::make();
        let caller = spawn({
            let (registry, resource) = (registry.clone(), resource.clone());
            move || {
                call(&registry, |_| {
                    call(&registry, |_| resource.use_it());
                    assert!(!resource.freed.load(Ordering::Relaxed));
                });
            }
        });
        handle.remove();
        handle.wait_idle(None).unwrap();
        resource.freed.store(true, Ordering::Relaxed);
        caller.join().unwrap();
    });
}

#[test]
fn a_hook_that_removes_itself() {
    explore(|| {
        let registry = registry();
        let handle = Arc::new(register(&registry));
        let resource = Resource::make();
        let caller = spawn({
            let (registry, handle) = (registry.clone(), handle.clone());
            let resource = resource.clone();
            move || {
                let mut first = false;
                call(&registry, |_| {
                    first = handle.remove();
                    resource.use_it();
                });
                first
            }
        });
        let first = handle.remove();
        handle.wait_idle(None).unwrap();
        resource.free(handle.calls());
        assert!(first ^ caller.join().unwrap(), "removed once and by one");
        assert!(!registry.occupied(PHASE));
    });
}

#[test]
fn quiesce_waits_for_what_was_purged() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let resource = Resource::make();
        let caller = spawn({
            let (registry, resource) = (registry.clone(), resource.clone());
            move || call(&registry, |_| resource.use_it())
        });
        handle.remove();
        // A second purge must not forget hooks that the first one found busy.
        let other = register(&registry);
        other.remove();
        registry.quiesce(None).unwrap();
        resource.free(handle.calls() + other.calls());
        caller.join().unwrap();
    });
}

#[test]
fn quiesce_beside_the_remover() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let done = Arc::new(AtomicBool::new(false));
        let resource = Resource::make();
        let caller = spawn({
            let (registry, resource) = (registry.clone(), resource.clone());
            move || call(&registry, |_| resource.use_it())
        });
        let remover = spawn({
            let done = done.clone();
            move || {
                handle.remove();
                done.store(true, Ordering::Release);
                handle
            }
        });
        let may_free = done.load(Ordering::Acquire);
        registry.quiesce(None).unwrap();
        if may_free {
            resource.freed.store(true, Ordering::Relaxed);
        }
        caller.join().unwrap();
        remover.join().unwrap();
    });
}

#[test]
fn disabling_waits_and_enabling_publishes() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let resource = Resource::make();
        let caller = spawn({
            let (registry, resource) = (registry.clone(), resource.clone());
            move || {
                for _ in 0..2 {
                    call(&registry, |_| resource.use_it());
                }
            }
        });
        handle.set_enabled(false);
        handle.wait_idle(None).unwrap();
        resource.freed.store(true, Ordering::Relaxed);
        resource.freed.store(false, Ordering::Relaxed);
        handle.set_enabled(true);
        caller.join().unwrap();
        assert!(handle.enabled() && !handle.removed());
        assert_eq!(ids(&registry), [handle.id().get()]);
    });
}

#[test]
fn no_registration_is_lost() {
    explore(|| {
        let registry = registry();
        let registrars = [(), ()].map(|()| {
            let registry = registry.clone();
            spawn(move || {
                let id = register(&registry).id().get();
                assert!(ids(&registry).contains(&id), "its own thread sees it");
                id
            })
        });
        let found = ids(&registry);
        let mut expected = registrars.map(|registrar| registrar.join().unwrap());
        expected.sort_unstable();
        assert_eq!(ids(&registry), expected);
        assert!(found.is_sorted() && found.iter().all(|id| expected.contains(id)));
    });
}

#[test]
fn publishing_does_not_resurrect() {
    explore(|| {
        let registry = registry();
        let token = Token::default();
        let doomed = registry.register(PHASE, token.clone(), Placement::default());
        drop(registry.snapshot(PHASE)); // the second one publishes
        let publisher = spawn({
            let registry = registry.clone();
            move || drop(registry.snapshot(PHASE))
        });
        let registrar = spawn({
            let registry = registry.clone();
            move || register(&registry).id().get()
        });
        doomed.remove();
        assert!(!ids(&registry).contains(&doomed.id().get()));
        publisher.join().unwrap();
        let added = registrar.join().unwrap();
        assert_eq!(ids(&registry), [added]);
        assert!(registry.occupied(PHASE));
        assert_eq!(Arc::strong_count(&token), 1, "nothing holds the callback");
    });
}

#[test]
fn a_new_priority_reaches_the_next_snapshot() {
    explore(|| {
        let registry = registry();
        let (first, second) = (register(&registry), register(&registry));
        let expected = [second.id().get(), first.id().get()];
        drop(registry.snapshot(PHASE)); // the second one publishes
        let publisher = spawn({
            let registry = registry.clone();
            move || assert_eq!(ids(&registry).len(), 2)
        });
        second.set_priority(1);
        assert_eq!(ids(&registry), expected);
        publisher.join().unwrap();
        assert_eq!(ids(&registry), expected);
    });
}

#[test]
fn occupied_is_right_in_the_end() {
    explore(|| {
        let registry = registry();
        let last = registry.register(Phase::Backward, Token::default(), Placement::default());
        let doomed = register(&registry);
        let registrar = spawn({
            let registry = registry.clone();
            move || {
                register(&registry);
                assert!(registry.occupied(PHASE));
            }
        });
        // Two phases share the word; each has its own list.
        let remover = spawn(move || last.remove());
        doomed.remove();
        registrar.join().unwrap();
        remover.join().unwrap();
        assert!(registry.occupied(PHASE));
        assert!(!registry.occupied(Phase::Backward));
        registry.clear(None);
        assert!(registry.idle());
    });
}

#[test]
fn who_watches_keeps_it_from_being_idle() {
    explore(|| {
        let registry = registry();
        let watch = registry.watch();
        let doomed = register(&registry);
        let other = spawn({
            let registry = registry.clone();
            move || drop(registry.watch())
        });
        doomed.remove();
        assert!(!registry.occupied(PHASE));
        assert!(!registry.idle());
        drop(watch);
        other.join().unwrap();
        assert!(registry.idle());
    });
}

#[test]
fn a_watched_phase_is_told_until_the_last_watch_is_gone() {
    explore(|| {
        let registry = registry();
        let watch = registry.watch();
        let other = spawn({
            let registry = registry.clone();
            move || {
                let watch = registry.watch();
                watch.add(PHASE);
                assert!(registry.work().watched(PHASE));
            }
        });
        drop(watch);
        other.join().unwrap();
        assert!(registry.idle());
        let timed = registry.time();
        assert!(registry.work().timed() && !registry.work().watched(PHASE));
        drop(timed);
        assert!(registry.idle());
    });
}

#[test]
fn clearing_beside_registering_and_removing() {
    explore(|| {
        let registry = registry();
        let handle = register(&registry);
        let registrar = spawn({
            let registry = registry.clone();
            move || register(&registry)
        });
        let remover = spawn(move || handle.remove());
        registry.clear(Some(PHASE));
        let other = registrar.join().unwrap();
        remover.join().unwrap();
        assert_eq!(registry.occupied(PHASE), !other.removed());
        assert_eq!(ids(&registry).len(), usize::from(!other.removed()));
    });
}

#[test]
fn the_registry_goes_while_a_handle_removes() {
    explore(|| {
        let registry = registry();
        let token = Token::default();
        let handle = registry.register(PHASE, token.clone(), Placement::default());
        let caller = spawn({
            let registry = registry.clone();
            move || {
                call(&registry, |entry| {
                    assert!(Arc::strong_count(entry.hook()) > 1);
                });
            }
        });
        drop(registry);
        assert!(handle.remove());
        handle.wait_idle(None).unwrap();
        caller.join().unwrap();
        assert_eq!(Arc::strong_count(&token), 1);
        assert!(handle.removed());
    });
}
