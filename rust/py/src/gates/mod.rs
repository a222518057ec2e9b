//! Gates of a request: their readings by token, values made of these, and what depends on them.
//!
//! Python reads tensors ([`crate::effects::gate`]); here are the numbers. A gate's values are decided
//! for each request and step, and there may be many requests, so no Python runs for them.

pub mod aggregation;
pub mod conditions;
mod readings;
pub mod state;
pub mod writer;
