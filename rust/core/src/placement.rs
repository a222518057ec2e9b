/// Position of a hook in the order of its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Higher fires first.
    pub priority: i64,
    /// Ahead of all others of its priority, instead of after them.
    pub prepend: bool,
}
