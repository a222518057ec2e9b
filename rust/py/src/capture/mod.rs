//! Captures: recorders, and the collectors that store their values.
//!
//! A capture is a scope with a native hook on each module, the `Recorder`, after all other hooks. A
//! tensor that needs no gradient is stored as it is, with its version. To end the forward
//! (`stop=True`) a recorder raises `Stop`, which is no `Exception`; the call of the model returns
//! `STOPPED` instead, and two more hooks on the model mark where such a call begins and ends. The
//! hook that receives gradients refers to the collector weakly: autograd's graph keeps nothing of a
//! capture alive.

pub mod collector;
mod joining;
pub mod keeping;
pub mod reading;
pub mod recorder;
pub mod request;
pub mod root_calls;
mod store;
mod together;
