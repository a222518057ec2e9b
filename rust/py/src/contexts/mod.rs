//! Contexts (`contextvars`): the frames that a context has entered, and their hooks.
//!
//! A context variable holds the tuple of entered frames. A frame's hooks live with the frame, in a
//! registry for each module, so that a call never walks the hooks of other contexts: it looks for
//! frames only where the module's word says that some frame has hooks for it, and then merges
//! their snapshots with the module's own by the one order of all hooks. A module knows the
//! registries that frames have for it, for `quiesce` and for being given back; a frame forgets
//! modules that are gone. Scopes, captures, the levels and the lasting hooks of hook points, and
//! calls that record are frames; the tag says which.

pub mod current;
pub mod frame;
pub mod scoped;
