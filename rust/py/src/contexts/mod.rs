//! Contexts (`contextvars`): the frames that a context has entered, and their hooks.
//!
//! A context variable holds the tuple of entered frames. A frame's hooks are stored in the frame,
//! in a registry for each module, so a call never walks hooks of other contexts: if the module's
//! word says that some frame has hooks for it, the call merges the snapshots of its frames with the
//! module's own, in the one order of all hooks. Each hook then knows its owner, the frame that it
//! fires for: once that has ended the hook never starts again. A module lists the registries that
//! frames have for it, for `quiesce` and for its release; a frame forgets modules that are gone.
//! Scopes, captures and the levels and the lasting hooks of hook points are frames; the tag says
//! which.

pub mod activation;
pub mod calls;
pub mod current;
pub mod frame;
pub mod log;
pub mod owners;
pub mod regions;
pub mod releases;
pub mod scoped;
pub mod slot;
pub mod state;
