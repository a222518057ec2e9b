#![doc = include_str!("../README.md")]

mod error;
mod handle;
mod phase;
mod registry;
mod snapshot;
mod state;
mod sync;
mod work;

pub use error::WaitError;
pub use handle::Handle;
pub use phase::Phase;
pub use registry::{Active, Placement, Registry};
pub use snapshot::{Entry, Snapshot};
pub use state::{HookId, Inside, Invocation};
pub use work::{Watch, Work};
