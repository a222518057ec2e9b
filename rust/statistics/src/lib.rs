//! Streaming statistics of floats and integers, for detectors. They merge: each thread and each
//! process counts its own.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts beyond 2^53 may round where they are weights or ranks"
)]
#![expect(
    clippy::inline_always,
    reason = "the caller's target features decide how the loop is compiled"
)]

mod float;
mod histogram;
mod moments;
mod non_finite;

pub use float::{Bf16, F16, Float};
pub use histogram::Histogram;
pub use moments::Moments;
pub use non_finite::NonFinite;

/// Numbers per block: a block stays in the L1 cache between passes.
const BLOCK: usize = 1024;
