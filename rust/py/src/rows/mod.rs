//! Rows: batches, in whose calls the hooks of many requests run, each on rows of its own.
//!
//! A batch is a frame in the context, like a scope. Its slot tells the call of [`calls::around::Rows`], which
//! takes the hooks of the members for each phase: native ones of all members run side by side
//! ([`calls::stages`]), remembered for the next calls ([`calls::remembered`]); others in a call of their own on
//! tensors narrowed to the member's rows ([`calls::value`]). Members are frames that are not entered; what
//! a batch keeps with one is its [`membership::Membership`]. A class of native hooks says by
//! [`calls::merging::InBatch`] what it does in batches.

pub mod at;
pub mod batch;
pub mod calls;
mod given;
pub mod layout;
pub mod mask;
pub mod matrix;
mod member;
pub mod membership;
pub mod numbers;
pub mod places;
mod positions;
