//! Streaming statistics of floats and integers, kept by detectors. They merge, so that each thread and
//! each process counts its own.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts beyond 2^53 may round where they are weights or ranks"
)]
#![expect(
    clippy::inline_always,
    reason = "what calls it decides for which processors the loop is compiled"
)]

mod float;
mod histogram;
mod moments;
mod non_finite;

pub use float::{Bf16, F16, Float};
pub use histogram::Histogram;
pub use moments::Moments;
pub use non_finite::NonFinite;

/// How many numbers are looked at in one go: they stay in the fastest cache between the looks.
const BLOCK: usize = 1024;
