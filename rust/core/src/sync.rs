//! The one seam between this crate and its synchronisation: `parking_lot` and `arc-swap`, or,
//! under `--cfg loom`, loom's model of them. Nothing else in the crate names either.
//!
//! loom has no model of arc-swap: [`Slot`] is a locked `Option<Arc<_>>` there, so loom explores
//! this crate's protocol on top of an atomic slot, not arc-swap's own insides.

#[cfg(not(loom))]
mod imp {
    pub(crate) use parking_lot::Mutex;
    pub(crate) use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    pub(crate) use std::thread_local;

    use std::sync::{Arc, OnceLock};
    use std::time::Instant;

    /// Slot for an `Arc`, read without a lock.
    ///
    /// Allocated when first filled: most never are, and emptying or dropping an `ArcSwap` pays off
    /// the borrows of every thread, which takes longer than the rest of registering.
    pub(crate) struct Slot<T>(OnceLock<arc_swap::ArcSwapOption<T>>);

    impl<T> Slot<T> {
        pub(crate) fn empty() -> Self {
            Self(OnceLock::new())
        }

        /// None if it is empty.
        #[inline]
        pub(crate) fn load(&self) -> Option<Lease<T>> {
            let lease = self.0.get()?.load();
            lease.is_some().then_some(lease)
        }

        /// Call from one thread at a time.
        pub(crate) fn swap(&self, value: Option<Arc<T>>) -> Option<Arc<T>> {
            if value.is_some() {
                return self
                    .0
                    .get_or_init(arc_swap::ArcSwapOption::empty)
                    .swap(value);
            }
            let filled = self.0.get().filter(|slot| slot.load().is_some())?;
            filled.swap(None)
        }
    }

    /// Borrow of a [`Slot`]'s value. It touches the `Arc`'s count only if its thread has about
    /// eight already, or when the slot is filled anew.
    pub(crate) type Lease<T> = arc_swap::Guard<Option<Arc<T>>>;

    pub(crate) fn lease<T>(value: Arc<T>) -> Lease<T> {
        arc_swap::Guard::from_inner(Some(value))
    }

    /// Parker of threads that wait for a hook to become idle.
    pub(crate) struct Parker {
        mutex: Mutex<()>,
        condvar: parking_lot::Condvar,
    }

    impl Parker {
        /// Sleeps until `busy` is false; returns false if `deadline` came first.
        pub(crate) fn wait_while(
            &self,
            deadline: Option<Instant>,
            mut busy: impl FnMut() -> bool,
        ) -> bool {
            let mut guard = self.mutex.lock();
            match deadline {
                None => self.condvar.wait_while(&mut guard, |()| busy()),
                Some(deadline) => {
                    let result = self
                        .condvar
                        .wait_while_until(&mut guard, |()| busy(), deadline);
                    return !result.timed_out();
                }
            }
            true
        }

        pub(crate) fn wake(&self) {
            drop(self.mutex.lock());
            self.condvar.notify_all();
        }
    }

    pub(crate) fn parker() -> &'static Parker {
        static PARKER: Parker = Parker {
            mutex: Mutex::new(()),
            condvar: parking_lot::Condvar::new(),
        };
        &PARKER
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    pub(crate) use loom::thread_local;

    use std::sync::Arc;
    use std::time::Instant;

    /// `parking_lot`'s interface on loom's mutex.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    pub(crate) struct Slot<T>(Mutex<Option<Arc<T>>>);

    impl<T> Slot<T> {
        pub(crate) fn empty() -> Self {
            Self(Mutex::new(None))
        }

        pub(crate) fn load(&self) -> Option<Lease<T>> {
            self.0.lock().clone().map(Some)
        }

        pub(crate) fn swap(&self, value: Option<Arc<T>>) -> Option<Arc<T>> {
            std::mem::replace(&mut *self.0.lock(), value)
        }
    }

    pub(crate) type Lease<T> = Option<Arc<T>>;

    #[expect(clippy::unnecessary_wraps, reason = "same type as arc-swap's guard")]
    pub(crate) fn lease<T>(value: Arc<T>) -> Lease<T> {
        Some(value)
    }

    pub(crate) struct Parker {
        mutex: Mutex<()>,
        condvar: loom::sync::Condvar,
    }

    impl Parker {
        /// Time does not pass in a model: a deadline is never reached.
        pub(crate) fn wait_while(
            &self,
            _deadline: Option<Instant>,
            mut busy: impl FnMut() -> bool,
        ) -> bool {
            let mut guard = self.mutex.lock();
            while busy() {
                guard = self.condvar.wait(guard).unwrap();
            }
            true
        }

        pub(crate) fn wake(&self) {
            drop(self.mutex.lock());
            self.condvar.notify_all();
        }
    }

    pub(crate) fn parker() -> &'static Parker {
        loom::lazy_static! {
            static ref PARKER: Parker = Parker {
                mutex: Mutex::new(()),
                condvar: loom::sync::Condvar::new(),
            };
        }
        &PARKER
    }
}

pub(crate) use imp::*;
