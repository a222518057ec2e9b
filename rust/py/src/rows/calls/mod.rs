//! Calls in a batch: the hooks of its members, merged into stages or one after the other.

pub mod around;
pub mod hooks;
pub mod joined_tokens;
mod memory;
pub mod merging;
pub mod program;
pub mod program_cache;
pub mod run;
mod stand_ins;
pub mod value;
