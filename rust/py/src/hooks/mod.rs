//! A registered hook: its callback, its options, its handle, and what its failing leads to.

pub mod handle;
pub mod hook;
pub mod native;
pub mod options;
pub mod site;
