//! Time of one call and of one change of a registry.
//!
//! `cargo bench -p ferrohook-core`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented public function"
)]

#[cfg(not(loom))]
mod cost {
    use std::hint::black_box;

    use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
    use ferrohook_core::{Inside, Phase, Placement, Registry};

    type Hook = fn(&mut u64);

    const PHASE: Phase = Phase::Forward;

    fn increment(value: &mut u64) {
        *value += 1;
    }

    fn register(registry: &Registry<Hook>, count: usize) {
        for _ in 0..count {
            registry.register(PHASE, increment, Placement::default());
        }
    }

    fn registry(count: usize) -> Registry<Hook> {
        let registry = Registry::new();
        register(&registry, count);
        registry
    }

    fn walk(registry: &Registry<Hook>, value: &mut u64) {
        let inside = Inside::here();
        for entry in registry.snapshot(PHASE).iter() {
            if let Some(_invocation) = entry.enter(&inside) {
                entry.hook()(value);
            }
        }
    }

    pub fn changes(c: &mut Criterion) {
        let mut group = c.benchmark_group("register and remove");
        for others in [0, 8, 1_000] {
            let registry = registry(others);
            group.bench_function(BenchmarkId::new("beside", others), |b| {
                b.iter(|| {
                    let handle = registry.register(PHASE, increment, Placement::default());
                    assert!(handle.remove());
                });
            });
            // Up to half of a long list is purged later.
            assert_eq!(registry.snapshot(PHASE).len(), others);
        }
        group.finish();

        // The time for each hook stays the same: n registrations cost n, not n squared.
        let mut group = c.benchmark_group("register n between two snapshots");
        for count in [1_000, 10_000] {
            group.throughput(Throughput::Elements(count as u64));
            group.bench_function(BenchmarkId::from_parameter(count), |b| {
                b.iter_batched_ref(
                    || {
                        let registry = registry(1);
                        drop(registry.snapshot(PHASE));
                        registry
                    },
                    |registry| {
                        register(registry, count);
                        assert_eq!(registry.snapshot(PHASE).len(), 1 + count);
                    },
                    BatchSize::LargeInput,
                );
            });
        }
        group.finish();
    }

    pub fn calls(c: &mut Criterion) {
        let empty = registry(0);
        c.bench_function("occupied", |b| {
            b.iter(|| assert!(!black_box(&empty).occupied(PHASE)));
        });

        let registry_of_8 = registry(8);
        c.bench_function("snapshot", |b| {
            b.iter(|| black_box(&registry_of_8).snapshot(PHASE));
        });

        let mut group = c.benchmark_group("walk");
        for count in [1, 8, 1_000] {
            let registry = registry(count);
            let mut value = 0;
            walk(&registry, &mut value);
            assert_eq!(value, count as u64);
            group.throughput(Throughput::Elements(count as u64));
            group.bench_function(BenchmarkId::from_parameter(count), |b| {
                b.iter(|| walk(black_box(&registry), &mut value));
            });
        }
        group.finish();
    }
}

#[cfg(not(loom))]
criterion::criterion_group!(benches, cost::calls, cost::changes);
#[cfg(not(loom))]
criterion::criterion_main!(benches);

#[cfg(loom)]
fn main() {}
