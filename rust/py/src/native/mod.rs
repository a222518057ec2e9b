//! Native hooks: implementations of the trait.

pub mod detectors;
pub mod point;
pub mod typed;
