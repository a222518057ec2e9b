//! Captures: recorders, and the collector that stores their values.

pub mod collector;
mod keeping;
pub mod recorder;
mod store;
