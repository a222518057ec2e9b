//! Hooks that frames have for a module.

use std::sync::{Arc, Weak};

use ferrohook_core::{Phase, Registry, Watch};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::hooks::hook::Hook;

/// A module's side: the registries that frames have for it.
#[derive(Default)]
pub struct Scoped(Arc<Mutex<Registries>>);

/// Includes registries of closed frames, for as long as a thread is inside one of their hooks.
pub type Registries = Vec<Arc<Registry<Hook>>>;

impl Scoped {
    /// Returns the hooks of all frames, and of closed ones that a thread was inside of.
    pub fn hooks(&self) -> Registries {
        self.0.lock().clone()
    }
}

/// One frame's hooks for one module.
pub struct ScopedHooks {
    pub hooks: Arc<Registry<Hook>>,
    /// Weak: dropped with the module.
    module: Weak<Mutex<Registries>>,
    watch: Watch<Hook>,
}

impl ScopedHooks {
    /// Makes it; also returns registries that nothing uses any more, to drop with no lock held.
    fn new(Scoped(module): &Scoped, others: &Registry<Hook>) -> (Self, Registries) {
        let hooks: Arc<Registry<Hook>> = Arc::default();
        let mut registries = module.lock();
        let unused = registries.extract_if(.., is_unused).collect();
        registries.push(Arc::clone(&hooks));
        let scoped = Self {
            hooks,
            module: Arc::downgrade(module),
            watch: others.watch(),
        };
        (scoped, unused)
    }
}

fn is_unused(hooks: &mut Arc<Registry<Hook>>) -> bool {
    Arc::strong_count(hooks) == 1 && hooks.active().is_empty()
}

impl Drop for ScopedHooks {
    fn drop(&mut self) {
        if let Some(module) = self.module.upgrade()
            && self.hooks.active().is_empty()
        {
            module.lock().retain(|each| !Arc::ptr_eq(each, &self.hooks));
        }
    }
}

/// A frame's side: its hooks, by the ids of the modules' registries.
#[derive(Default)]
pub struct Modules {
    pub hooks: FxHashMap<u64, ScopedHooks>,
    /// Length at which hooks of dropped modules are looked for.
    limit: usize,
}

/// Number of modules up to which a frame does not look for dropped ones.
const FEW: usize = 32;

impl Modules {
    /// Returns the registry for a module, for registering a hook of `phase`; `others` is the one of
    /// every context. Also returns registries to be dropped with no lock held.
    pub fn hooks_to_change(
        &mut self,
        module: u64,
        phase: Phase,
        scoped: &Scoped,
        others: &Registry<Hook>,
    ) -> (Arc<Registry<Hook>>, Registries) {
        let mut unused = Vec::new();
        let entry = self.hooks.entry(module);
        let scoped = entry.or_insert_with(|| {
            let (scoped, gone) = ScopedHooks::new(scoped, others);
            unused = gone;
            scoped
        });
        scoped.watch.add(phase);
        (Arc::clone(&scoped.hooks), unused)
    }

    /// Removes the hooks.
    pub fn clear(self) {
        for scoped in self.hooks.values() {
            scoped.hooks.clear_all();
        }
    }

    /// Takes out the hooks of dropped modules, if the limit is reached.
    pub fn take_gone(&mut self) -> Vec<ScopedHooks> {
        if self.hooks.len() < self.limit {
            return Vec::new();
        }
        let gone = self
            .hooks
            .extract_if(|_, scoped| scoped.watch.gone())
            .map(|(_, scoped)| scoped)
            .collect();
        self.limit = FEW.max(2 * self.hooks.len());
        gone
    }
}
