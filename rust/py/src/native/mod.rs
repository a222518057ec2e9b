//! Native hooks: implementations of the trait `Native`.

pub mod detectors;
pub mod point;
pub mod typed;
