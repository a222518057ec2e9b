/// Reason why a wait for a hook to become idle ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The waiting thread is inside the hook itself: a deadlock.
    #[error("waiting for a hook from inside that hook would never end")]
    Inside,
    /// A thread was still inside the hook when the time was up.
    #[error("a thread was still inside the hook when the timeout passed")]
    TimedOut,
}
