//! Registered hooks: callback, options, handle, and the handling of exceptions.

pub mod callable;
pub mod changes;
pub mod handle;
pub mod hook;
pub mod last;
pub mod native;
pub mod operators;
pub mod options;
pub mod origin;
pub mod site;
