//! Modules and their registries: how a module gets one, and how its call gets there.

pub mod batch;
pub mod wrapper;
