//! Rows: batches, in whose calls the hooks of many requests run, each on its request's rows.
//!
//! A batch is a frame in the context, like a scope. Its slot gives the call
//! [`batch::Batches`], which takes the hooks of the members for each phase. Native hooks of all
//! members are a program ([`calls::program`]), which is cached for the next calls
//! ([`calls::program_cache`]). Other hooks run one by one, on tensors narrowed to the member's rows
//! ([`calls::value`]). Members are frames that are not entered; a batch keeps its state of one in
//! [`membership::Membership`]. A class of native hooks implements [`calls::merging::InBatch`] to run
//! in batches.

pub mod at;
pub mod batch;
pub mod call_tokens;
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
pub mod tracker;
