//! State of a frame: its life, the needs of its hooks, its part in batches.

use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use parking_lot::Mutex;
use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;

use crate::contexts::current::Entered;
use crate::contexts::releases::Releases;

/// Life of a frame, which begins once and is closed once.
#[derive(Default)]
pub struct FrameLife {
    /// True once the frame was entered, or joined a batch.
    pub begun: AtomicBool,
    /// None before the frame is entered, and after it is left.
    pub entered: Mutex<Option<Entered>>,
    /// Changes under the lock of the frame's modules.
    pub closed: AtomicBool,
    /// True if its backward hooks stay for the graphs that were recorded before it was closed.
    pub for_graphs: bool,
    /// Released on close.
    pub attachments: Releases,
}

/// Needs of the hooks that a frame was given.
#[derive(Default)]
pub struct HookNeeds {
    /// True once one of them has operators that stand in graphs.
    pub operators: AtomicBool,
    /// True once one of them needs gradients.
    pub gradients: AtomicBool,
    /// True once one of them runs Python.
    pub python: AtomicBool,
}

/// Part of a frame in batches.
#[derive(Default)]
pub struct BatchPart {
    /// Value of the tag's `begin`, called when the frame first joined a batch.
    pub value: OnceLock<Py<PyAny>>,
    /// Exception that ended it.
    pub failure: OnceLock<Py<PyBaseException>>,
    /// Time at which it ends.
    pub deadline: OnceLock<Instant>,
}
