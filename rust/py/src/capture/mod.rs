//! Captures: recorders and the collectors that store what they record.

pub mod recorder;
