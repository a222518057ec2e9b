//! Calls in a batch: the hooks of its members, merged into stages or one after the other.

pub mod around;
pub mod hooks;
mod memory;
pub mod merged;
pub mod merging;
pub mod remembered;
pub mod stages;
mod stand_ins;
pub mod value;
