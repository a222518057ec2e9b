//! A registered hook: its callback, its options and its handle.

pub mod handle;
pub mod hook;
