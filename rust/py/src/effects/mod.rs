//! Native hooks: implementations of the trait `Native`.

pub mod detectors;
pub mod gate;
pub mod gpu_vector;
pub mod intervention;
pub mod masked;
pub mod planned;
mod together;
pub mod tokens;
pub mod typed;
