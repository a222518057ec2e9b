//! Random histories of a registry against an oracle: a list in firing order.
#![cfg(not(loom))]

use std::convert::Infallible;
use std::rc::{Rc, Weak};

use ferrohook_core::{Handle, HookId, Inside, Phase, Placement, Registry, Snapshot};
use proptest::prelude::*;
use proptest::sample::Index;

/// Depth that finds faults of recursion and still ends.
const MAX_DEPTH: usize = 3;
const MAX_SITES: usize = 3;
/// Bound of a history: hooks that call and register multiply.
const MAX_REACTIONS: usize = 200;

#[derive(Clone, Debug)]
enum Op {
    /// The hook performs `reaction` each time it fires.
    Register {
        phase: Phase,
        placement: Placement,
        reaction: Option<Box<Op>>,
    },
    RegisterLast(Phase),
    RegisterMany(Phase, usize),
    RemoveMany(Index, usize),
    /// Acts on one hook; without an index, on the one that is firing, else on the newest.
    Remove(Option<Index>),
    SetEnabled(Option<Index>, bool),
    SetPriority(Option<Index>, i64),
    Clear(Option<Phase>),
    Call(Phase),
    Keep(Phase),
    CallKept(Index),
    Fork,
}

struct Hook {
    /// Its place in `Site::hooks`.
    tag: usize,
    token: Rc<()>,
    reaction: Option<Box<Op>>,
}

/// Expected state of one hook.
struct Expected {
    /// Ordinal of its registration in the history.
    nth: usize,
    id: HookId,
    phase: Phase,
    placement: Placement,
    last: bool,
    removed: bool,
    enabled: bool,
    calls: u64,
    token: Weak<()>,
    handle: Handle<Hook>,
}

/// A registry and the oracle beside it.
struct Site {
    registry: Registry<Hook>,
    hooks: Vec<Expected>,
    /// Tags of the hooks that are left, in firing order, by phase.
    order: [Vec<usize>; 4],
}

impl Site {
    fn new(registry: Registry<Hook>) -> Self {
        Self {
            registry,
            hooks: Vec::new(),
            order: Default::default(),
        }
    }

    fn fires_before(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.hooks[a], &self.hooks[b]);
        if a.last != b.last {
            return b.last;
        }
        if a.placement.priority != b.placement.priority {
            return a.placement.priority > b.placement.priority;
        }
        match (a.placement.prepend, b.placement.prepend) {
            (true, true) => a.nth > b.nth,
            (false, false) => a.nth < b.nth,
            (prepended, _) => prepended,
        }
    }

    fn place(&mut self, tag: usize) {
        let phase = self.hooks[tag].phase as usize;
        self.order[phase].retain(|&other| other != tag);
        let at = self.order[phase]
            .iter()
            .position(|&other| self.fires_before(tag, other))
            .unwrap_or(self.order[phase].len());
        self.order[phase].insert(at, tag);
    }

    fn forget(&mut self, tag: usize) {
        let expected = &mut self.hooks[tag];
        expected.removed = true;
        self.order[expected.phase as usize].retain(|&other| other != tag);
    }
}

#[derive(Default)]
struct World {
    sites: Vec<Site>,
    held: Vec<(usize, Rc<Snapshot<Hook>>)>,
    registered: usize,
    reactions: usize,
    last_id: Option<HookId>,
}

impl World {
    fn new() -> Self {
        Self {
            sites: vec![Site::new(Registry::new())],
            ..Self::default()
        }
    }

    fn perform(&mut self, at: usize, firing: Option<usize>, depth: usize, op: &Op) {
        match op {
            Op::Register {
                phase,
                placement,
                reaction,
            } => self.register(at, *phase, Some(*placement), reaction.clone()),
            Op::RegisterLast(phase) => self.register(at, *phase, None, None),
            Op::RegisterMany(phase, count) => {
                for _ in 0..*count {
                    self.register(at, *phase, Some(Placement::default()), None);
                }
            }
            Op::RemoveMany(index, count) => {
                let tags = self.sites[at].hooks.len();
                for offset in 0..(*count).min(tags) {
                    self.remove(at, (index.index(tags) + offset) % tags);
                }
            }
            Op::Remove(index) => {
                if let Some(tag) = self.tag(at, firing, *index) {
                    self.remove(at, tag);
                }
            }
            Op::SetEnabled(index, enabled) => {
                if let Some(tag) = self.tag(at, firing, *index) {
                    let expected = &mut self.sites[at].hooks[tag];
                    expected.handle.set_enabled(*enabled);
                    expected.enabled = *enabled;
                }
            }
            Op::SetPriority(index, priority) => {
                if let Some(tag) = self.tag(at, firing, *index) {
                    let expected = &mut self.sites[at].hooks[tag];
                    expected.handle.set_priority(*priority);
                    expected.placement.priority = *priority;
                    if !expected.removed {
                        self.sites[at].place(tag);
                    }
                }
            }
            Op::Clear(phase) => {
                let site = &mut self.sites[at];
                site.registry.clear(*phase);
                for tag in 0..site.hooks.len() {
                    let expected = &site.hooks[tag];
                    if !expected.last && phase.is_none_or(|phase| phase == expected.phase) {
                        site.forget(tag);
                    }
                }
            }
            Op::Call(phase) => {
                if depth < MAX_DEPTH {
                    let snapshot = self.snapshot(at, *phase);
                    self.walk(at, depth, &snapshot);
                }
            }
            Op::Keep(phase) => {
                let snapshot = self.snapshot(at, *phase);
                self.held.push((at, Rc::new(snapshot)));
            }
            Op::CallKept(index) => {
                if depth < MAX_DEPTH && !self.held.is_empty() {
                    let (at, snapshot) = self.held[index.index(self.held.len())].clone();
                    self.walk(at, depth, &snapshot);
                }
            }
            Op::Fork => self.fork(at),
        }
        self.check_handles();
    }

    fn tag(&self, at: usize, firing: Option<usize>, index: Option<Index>) -> Option<usize> {
        let hooks = &self.sites[at].hooks;
        let Some(index) = index else {
            return firing.or(hooks.len().checked_sub(1));
        };
        let left: Vec<_> = (0..hooks.len())
            .filter(|&tag| !hooks[tag].removed)
            .collect();
        // Mostly one that is left: most hooks of a history are gone soon.
        let any = index.index(4) == 0 || left.is_empty();
        match (any, hooks.len()) {
            (_, 0) => None,
            (true, hooks) => Some(index.index(4 * hooks) % hooks),
            (false, _) => Some(left[index.index(4 * left.len()) % left.len()]),
        }
    }

    fn new_id(&mut self, id: HookId) {
        assert!(self.last_id < Some(id), "ids increase");
        self.last_id = Some(id);
    }

    fn register(
        &mut self,
        at: usize,
        phase: Phase,
        placement: Option<Placement>,
        reaction: Option<Box<Op>>,
    ) {
        let site = &mut self.sites[at];
        let tag = site.hooks.len();
        let token = Rc::new(());
        let weak = Rc::downgrade(&token);
        let hook = Hook {
            tag,
            token,
            reaction,
        };
        let handle = match placement {
            Some(placement) => site.registry.register(phase, hook, placement),
            None => site.registry.register_last(phase, hook),
        };
        assert!(site.registry.occupied(phase));
        let id = handle.id();
        site.hooks.push(Expected {
            nth: self.registered,
            id,
            phase,
            placement: placement.unwrap_or_default(),
            last: placement.is_none(),
            removed: false,
            enabled: true,
            calls: 0,
            token: weak,
            handle,
        });
        site.place(tag);
        self.registered += 1;
        self.new_id(id);
    }

    fn remove(&mut self, at: usize, tag: usize) {
        let site = &mut self.sites[at];
        assert_eq!(site.hooks[tag].handle.remove(), !site.hooks[tag].removed);
        site.forget(tag);
    }

    /// Snapshot, compared with the oracle's list.
    fn snapshot(&self, at: usize, phase: Phase) -> Snapshot<Hook> {
        let site = &self.sites[at];
        let snapshot = site.registry.snapshot(phase);
        let mut tags = Vec::new();
        for entry in snapshot.iter() {
            let expected = &site.hooks[entry.hook().tag];
            assert_eq!(entry.removed(), expected.removed);
            assert_eq!(entry.id(), expected.id);
            assert_eq!(entry.phase(), expected.phase);
            assert_eq!(entry.enabled(), expected.enabled);
            assert_eq!(entry.calls(), expected.calls);
            assert_eq!(entry.priority(), expected.placement.priority);
            if !entry.removed() {
                tags.push(entry.hook().tag);
            }
        }
        assert_eq!(tags, site.order[phase as usize]);
        snapshot
    }

    fn walk(&mut self, at: usize, depth: usize, snapshot: &Snapshot<Hook>) {
        let inside = Inside::here();
        for entry in snapshot.iter() {
            let hook = entry.hook();
            let expected = &self.sites[at].hooks[hook.tag];
            let fires = expected.enabled && !expected.removed;
            let invocation = entry.enter(&inside);
            assert_eq!(invocation.is_some(), fires);
            if invocation.is_some() {
                if let Some(reaction) = &hook.reaction
                    && self.reactions < MAX_REACTIONS
                {
                    self.reactions += 1;
                    self.perform(at, Some(hook.tag), depth + 1, reaction);
                }
                drop(invocation);
                self.sites[at].hooks[hook.tag].calls += 1;
            }
        }
    }

    fn fork(&mut self, at: usize) {
        if self.sites.len() == MAX_SITES {
            return;
        }
        let origin = &self.sites[at];
        let mut origins = Vec::new();
        let copy = |_: &Registry<Hook>, phase: Phase, hook: &Hook| {
            assert_eq!(phase, origin.hooks[hook.tag].phase);
            origins.push(hook.tag);
            Ok::<_, Infallible>(Hook {
                tag: origins.len() - 1,
                token: Rc::new(()),
                reaction: hook.reaction.clone(),
            })
        };
        let Ok(registry) = origin.registry.fork(copy);
        let mut site = Site::new(registry);
        let snapshots = Phase::ALL.map(|phase| site.registry.snapshot(phase));
        for (tag, origin_tag) in origins.into_iter().enumerate() {
            let expected = &origin.hooks[origin_tag];
            let entry = snapshots[expected.phase as usize]
                .iter()
                .find(|entry| entry.hook().tag == tag)
                .expect("every copy is registered for the phase of its original");
            site.hooks.push(Expected {
                id: entry.id(),
                calls: 0,
                token: Rc::downgrade(&entry.hook().token),
                handle: site.registry.handle(entry),
                ..*expected
            });
            site.place(tag);
        }
        let copied = |site: &Site| {
            let is_copied = |tag: &&usize| !site.hooks[**tag].last;
            let copied = |order: &Vec<usize>| order.iter().filter(is_copied).count();
            site.order.each_ref().map(copied)
        };
        assert_eq!(copied(&site), copied(origin));
        assert!(site.hooks.iter().all(|expected| !expected.last));
        let ids: Vec<_> = site.hooks.iter().map(|expected| expected.id).collect();
        self.sites.push(site);
        for id in ids {
            self.new_id(id);
        }
    }

    fn check_handles(&self) {
        for site in &self.sites {
            for expected in &site.hooks {
                let handle = &expected.handle;
                assert_eq!(handle.id(), expected.id);
                assert_eq!(handle.phase(), expected.phase);
                assert_eq!(handle.removed(), expected.removed);
                assert_eq!(handle.enabled(), expected.enabled);
                assert_eq!(handle.calls(), expected.calls);
                assert_eq!(handle.priority(), expected.placement.priority);
                assert!(expected.removed || expected.token.strong_count() == 1);
            }
            let occupied = Phase::ALL.map(|phase| site.registry.occupied(phase));
            assert_eq!(
                occupied,
                site.order.each_ref().map(|order| !order.is_empty())
            );
            assert_eq!(site.registry.idle(), !occupied.contains(&true));
        }
    }

    /// Bounds the removed hooks that wait for the next purge while no call or snapshot holds them.
    fn check_garbage(&self) {
        for site in self.sites.iter().filter(|_| self.held.is_empty()) {
            for phase in Phase::ALL {
                let left = site.order[phase as usize].len();
                let garbage = (site.hooks.iter())
                    .filter(|expected| expected.phase == phase && expected.removed)
                    .filter(|expected| expected.token.strong_count() > 0)
                    .count();
                assert!(garbage == 0 || (garbage < left && garbage + left > 64));
            }
        }
    }

    fn finish(mut self) {
        let mut visited = 0;
        for (at, site) in self.sites.iter().enumerate() {
            for phase in Phase::ALL {
                drop(self.snapshot(at, phase));
            }
            assert_eq!(site.registry.quiesce(None), Ok(()));
            let Ok(()) = site.registry.visit(|_| {
                visited += 1;
                Ok::<_, Infallible>(())
            });
        }
        let left: usize = (self.sites.iter().flat_map(|site| &site.order))
            .map(Vec::len)
            .sum();
        assert!(visited >= left);
        // Handles outlive the registries and keep no callback.
        self.held.clear();
        for site in self.sites {
            drop(site.registry);
            for expected in &site.hooks {
                assert_eq!(expected.token.strong_count(), 0);
            }
            for expected in &site.hooks {
                assert_eq!(expected.handle.remove(), !expected.removed);
                assert!(expected.handle.removed());
            }
        }
    }
}

fn phase() -> impl Strategy<Value = Phase> {
    prop_oneof![4 => Just(Phase::Forward), 1 => prop::sample::select(&Phase::ALL[..])]
}

fn placement() -> impl Strategy<Value = Placement> {
    (-2..=2i64, any::<bool>()).prop_map(|(priority, prepend)| Placement { priority, prepend })
}

fn index() -> impl Strategy<Value = Option<Index>> {
    prop::option::weighted(0.8, any::<Index>())
}

/// Op whose hooks, if it registers one, react with an op of `reaction`.
fn op_with(
    reaction: impl Strategy<Value = Option<Box<Op>>> + 'static,
) -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (phase(), placement(), reaction).prop_map(|(phase, placement, reaction)| {
            Op::Register { phase, placement, reaction }
        }),
        1 => (phase(), 0..80usize).prop_map(|(phase, count)| Op::RegisterMany(phase, count)),
        1 => phase().prop_map(Op::RegisterLast),
        1 => (any::<Index>(), 0..80usize).prop_map(|(index, count)| Op::RemoveMany(index, count)),
        4 => index().prop_map(Op::Remove),
        4 => (index(), any::<bool>()).prop_map(|(index, enabled)| Op::SetEnabled(index, enabled)),
        4 => (index(), -2..=2i64).prop_map(|(index, priority)| Op::SetPriority(index, priority)),
        1 => prop::option::of(phase()).prop_map(Op::Clear),
        8 => phase().prop_map(Op::Call),
        2 => phase().prop_map(Op::Keep),
        2 => any::<Index>().prop_map(Op::CallKept),
        1 => Just(Op::Fork),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let inert = op_with(Just(None));
    let reacting = op_with(prop::option::of(inert.prop_map(Box::new)));
    op_with(prop::option::of(reacting.prop_map(Box::new)))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        // A failed history is printed whole, to become a separate test.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn agrees_with_a_list(ops in prop::collection::vec((any::<Index>(), op()), 1..60)) {
        let mut world = World::new();
        for (site, op) in &ops {
            // Mostly the first: only it has a handle for each of its hooks.
            let at = site.index(2 * world.sites.len()).saturating_sub(world.sites.len());
            world.perform(at, None, 0, op);
            world.check_garbage();
        }
        world.finish();
    }
}

proptest! {
    /// Hooks spread over several registries fire in the order that they have in a single one.
    #[test]
    fn merged_snapshots_are_in_the_order_of_one_registry(
        hooks in prop::collection::vec((0..4_usize, -2..3_i64, any::<bool>(), any::<bool>()), 0..40),
    ) {
        let phase = Phase::Forward;
        let (single, spread) = (Registry::new(), [(); 4].map(|()| Registry::new()));
        let hooks_of: Vec<_> = hooks.iter().map(|hook| hook.0).collect();
        for (nth, &(place, priority, prepend, removed)) in hooks.iter().enumerate() {
            let placement = Placement { priority, prepend };
            for registry in [&single, &spread[place]] {
                let handle = registry.register(phase, nth, placement);
                if removed {
                    handle.remove();
                }
            }
        }
        let snapshots = spread.each_ref().map(|registry| registry.snapshot(phase));
        let (merged, numbers) = Snapshot::merged(&snapshots);
        let hooks = |snapshot: &Snapshot<usize>| -> Vec<usize> {
            snapshot.iter().map(|entry| *entry.hook()).collect()
        };
        prop_assert_eq!(hooks(&merged), hooks(&single.snapshot(phase)));
        let places: Vec<_> = hooks(&merged).iter().map(|nth| hooks_of[*nth]).collect();
        prop_assert_eq!(&*numbers, &*places);
    }
}
