//! Contexts (`contextvars`): the scopes that each has entered.

pub mod scope;
