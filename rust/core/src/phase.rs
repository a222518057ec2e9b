use std::fmt;

/// The part of a module's work that a hook is registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Before the module runs; sees its input.
    ForwardPre,
    /// After the module ran; sees its input and output.
    Forward,
    /// Before gradients flow into the module; sees the gradient of its output.
    BackwardPre,
    /// After gradients flowed through the module; sees both gradients.
    Backward,
}

impl Phase {
    /// Every phase, in the order in which a training step reaches them.
    pub const ALL: [Self; 4] = [
        Self::ForwardPre,
        Self::Forward,
        Self::BackwardPre,
        Self::Backward,
    ];

    /// The phase's name in the project's vocabulary, `forward_pre` for instance.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ForwardPre => "forward_pre",
            Self::Forward => "forward",
            Self::BackwardPre => "backward_pre",
            Self::Backward => "backward",
        }
    }

    /// Looks a phase up by its name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }

    pub(crate) const fn bit(self) -> u64 {
        1 << self as usize
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
