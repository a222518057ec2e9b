//! Modules and their registries: how a module gets one, and how its call gets there.

pub mod dispatcher;
pub mod lookup;
pub mod wrapper;
