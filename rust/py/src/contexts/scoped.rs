//! Hooks that frames have for a module.

use std::sync::{Arc, Weak};

use ferrohook_core::{Phase, Registry, Watch};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::hooks::hook::Hook;

/// A module's side: the registries that frames have for it.
#[derive(Default)]
pub struct Scoped(Arc<Mutex<Registries>>);

/// Includes those of closed frames, for as long as a thread is inside one of their hooks.
type Registries = Vec<Arc<Registry<Hook>>>;

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
    fn new(Scoped(module): &Scoped, others: &Registry<Hook>) -> Self {
        let hooks: Arc<Registry<Hook>> = Arc::default();
        let mut registries = module.lock();
        registries.retain(|each| Arc::strong_count(each) > 1 || !each.active().is_empty());
        registries.push(Arc::clone(&hooks));
        Self {
            hooks,
            module: Arc::downgrade(module),
            watch: others.watch(),
        }
    }
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
    /// every context.
    pub fn hooks_to_change(
        &mut self,
        module: u64,
        phase: Phase,
        scoped: &Scoped,
        others: &Registry<Hook>,
    ) -> Arc<Registry<Hook>> {
        let entry = self.hooks.entry(module);
        let scoped = entry.or_insert_with(|| ScopedHooks::new(scoped, others));
        scoped.watch.add(phase);
        Arc::clone(&scoped.hooks)
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
