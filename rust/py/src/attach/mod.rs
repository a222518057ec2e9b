//! Attaching: gives a module its registry, and its calls the way there.

pub mod attachment;
pub mod dispatcher;
pub mod generated;
pub mod instrumenting;
pub mod sites;
pub mod wrapper;
