/// Why waiting for a hook to become idle was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The waiting thread is inside the hook itself and would wait for ever.
    #[error("waiting for a hook from inside that hook would never end")]
    Inside,
    /// A thread was still inside the hook when the time was up.
    #[error("a thread was still inside the hook when the timeout passed")]
    TimedOut,
}
