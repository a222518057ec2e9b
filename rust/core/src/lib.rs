#![doc = include_str!("../README.md")]

mod error;
mod handle;
mod phase;
mod placement;
mod registry;
mod shared;
mod snapshot;
mod state;
mod sync;
mod watch;
mod work;

pub use error::WaitError;
pub use handle::Handle;
pub use phase::Phase;
pub use placement::Placement;
pub use registry::{Active, Registry};
pub use snapshot::{Entry, Snapshot};
pub use state::{HookId, Inside, Invocation};
pub use watch::Watch;
pub use work::Work;
