//! Modules and their registries: how a module gets one, and how its call gets there.

pub mod attachment;
pub mod dispatcher;
pub mod instrumenting;
pub mod wrapper;
