//! Contexts (`contextvars`) and scopes: hooks that fire for the calls of some contexts alone.

pub mod current;
pub mod scope;
pub mod scoped;
