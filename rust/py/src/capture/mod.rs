//! Captures: recorders, and the collectors that store their values.

pub mod collector;
pub mod keeping;
pub mod recorder;
mod store;
