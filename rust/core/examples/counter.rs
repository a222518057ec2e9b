//! A registry of plain closures: register, walk, disable, remove.

use ferrohook_core::{Inside, Phase, Placement, Registry};

type Hook = Box<dyn Fn(&mut Vec<f32>) + Send + Sync>;

fn run(registry: &Registry<Hook>, activations: &mut Vec<f32>) {
    let inside = Inside::here();
    for entry in registry.snapshot(Phase::Forward).iter() {
        // Asked right before each invocation: a hook removed meanwhile does not fire.
        if let Some(_invocation) = entry.enter(&inside) {
            entry.hook()(activations);
        }
    }
}

fn main() {
    let registry = Registry::<Hook>::new();
    let scale = registry.register(
        Phase::Forward,
        Box::new(|values| values.iter_mut().for_each(|value| *value *= 2.0)),
        Placement::default(),
    );
    let shift = registry.register(
        Phase::Forward,
        Box::new(|values| values.iter_mut().for_each(|value| *value += 1.0)),
        Placement {
            priority: 1,
            ..Placement::default()
        },
    );

    let mut activations = vec![1.0, 2.0];
    run(&registry, &mut activations);
    assert_eq!(activations, [4.0, 6.0]);

    shift.remove();
    scale.set_enabled(false);
    run(&registry, &mut activations);
    assert_eq!(activations, [4.0, 6.0]);
    println!("{scale:?} fired {} time, {shift:?} too", scale.calls());
}
