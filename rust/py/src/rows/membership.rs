//! Membership of a frame in batches.

use std::any::Any;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::contexts::calls::Calls;
use crate::contexts::frame::Frame;
use crate::contexts::slot::{FrameSlot, SlotState};
use crate::error::rows_error;
use crate::rows::at::Masks;
use crate::rows::calls::program_cache::ProgramCache;

/// Per-request row state of a frame: its batches, and the token positions of its running forwards.
#[derive(Default)]
pub struct Membership(Mutex<State>);

#[derive(Default)]
struct State {
    /// True while the frame is a member of an entered batch.
    joined: bool,
    /// True while sites carry out its plan.
    in_sites: bool,
    closed: bool,
    /// Programs of the last batch whose first member it was.
    programs: Option<Box<ProgramCache>>,
    /// Lengths of its prompts, as the last batch that was given some had them; none if not known.
    prompts: Arc<[i64]>,
    /// Tokens at the positions of its plan in the calls of its batch.
    masks: Option<Arc<Masks>>,
    /// State of the running calls of the model.
    calls: Calls<MemberCall>,
    /// Masks of the forward whose phases are repeated.
    repeats: Calls<Arc<Masks>>,
}

/// Call of a module that takes tokens.
#[derive(Default)]
pub struct MemberCall {
    /// Tokens at the positions of the plan; None until they are found.
    pub masks: Option<Arc<Masks>>,
    /// Its tokens and their sequences, as Python keeps them.
    pub tokens: Option<Py<PyAny>>,
}

const SERVED: &str = "a request served by sites cannot have extra hooks: register them in its plan";

impl Membership {
    /// Returns the state of a frame that joined a batch before.
    pub fn of(frame: &Frame) -> Option<&Self> {
        (frame.slot()? as &dyn Any).downcast_ref()
    }

    /// Returns the state of any frame but a batch.
    fn of_any(frame: &Frame) -> Option<&Self> {
        let slot: &dyn Any = frame.slot_or(|| Box::new(Self::default()));
        slot.downcast_ref()
    }

    /// Sets the tokens at the positions of a plan in the calls of its batch from now on; None: each
    /// call of the model says which they are.
    pub fn set_masks(frame: &Frame, masks: Option<Masks>) {
        let former = Self::of_any(frame).and_then(|membership| {
            mem::replace(&mut membership.0.lock().masks, masks.map(Arc::new))
        });
        drop(former); // runs Python code
    }

    /// True if its batch said which tokens are at the positions of its plan.
    pub fn positioned(frame: &Frame) -> bool {
        Self::of(frame).is_some_and(|membership| membership.0.lock().masks.is_some())
    }

    /// Begins a call on this thread, whose tokens at the positions are these, if they are known.
    pub fn begin_call(frame: &Frame, masks: Option<Arc<Masks>>) {
        if let Some(membership) = Self::of_any(frame) {
            let tokens = None;
            membership
                .0
                .lock()
                .calls
                .begin(MemberCall { masks, tokens });
        }
    }

    /// Sets the state of the innermost call on this thread.
    pub fn set_call(frame: &Frame, call: MemberCall) {
        let former = Self::of(frame).and_then(|membership| {
            let mut state = membership.0.lock();
            Some(mem::replace(state.calls.innermost()?, call))
        });
        drop(former); // runs Python code
    }

    /// Returns the call around the innermost one on this thread.
    pub fn around(py: Python<'_>, frame: &Frame) -> Option<MemberCall> {
        let state = Self::of(frame)?.0.lock();
        state.calls.around().map(|call| MemberCall {
            masks: call.masks.clone(),
            tokens: call.tokens.as_ref().map(|it| it.clone_ref(py)),
        })
    }

    /// Ends the innermost call on this thread, and returns it.
    pub fn end_call(frame: &Frame) -> Option<MemberCall> {
        Self::of(frame)?.0.lock().calls.end()
    }

    /// Tokens at the positions of a plan in the running forward; None if they are not known.
    pub fn masks(frame: &Frame) -> Option<Arc<Masks>> {
        Self::of(frame)?.masks_here()
    }

    fn masks_here(&self) -> Option<Arc<Masks>> {
        let mut state = self.0.lock();
        if let Some(repeated) = state.repeats.innermost() {
            return Some(Arc::clone(repeated));
        }
        if state.masks.is_some() {
            return state.masks.clone();
        }
        if let Some(call) = state.calls.innermost() {
            return call.masks.clone();
        }
        state.calls.only()?.masks.clone()
    }

    /// Tokens in the forward whose phases are repeated here; None if none are.
    pub fn repeated(frame: &Frame) -> Option<Arc<Masks>> {
        let repeats = &mut Self::of(frame)?.0.lock().repeats;
        repeats.innermost().cloned()
    }

    pub fn set_prompts(frame: &Frame, lengths: Arc<[i64]>) {
        if let Some(membership) = Self::of_any(frame) {
            membership.0.lock().prompts = lengths;
        }
    }

    /// Lengths of the frame's prompts; none if they are not known.
    pub fn prompts(frame: &Frame) -> Arc<[i64]> {
        let membership = Self::of(frame);
        membership.map_or_else(Arc::default, |it| Arc::clone(&it.0.lock().prompts))
    }

    /// Makes a frame a member of an entered batch; `epoch` counts the changes of its hooks from now
    /// on.
    pub fn join(frame: &Bound<'_, Frame>, epoch: &Arc<AtomicU64>) -> PyResult<()> {
        let (py, this) = (frame.py(), frame.get());
        let refused = |message: &str| Err(rows_error(py, message));
        if this.closed() {
            return refused("a closed request cannot join a batch");
        }
        if this.shared_closed() {
            return refused("the plan of this request was closed, and its hooks were removed");
        }
        if this.entered(py).is_some() {
            return refused(
                "a request entered with `with` sees whole calls: pass a batch only requests that \
                 are not entered",
            );
        }
        if this.needs_gradients() {
            return refused(
                "backward hooks and captures of gradients get the gradients of the whole batch: a \
                 request in a batch cannot have any",
            );
        }
        let Some(membership) = Self::of_any(this) else {
            return refused("a batch cannot be a member of another batch");
        };
        {
            let mut state = membership.0.lock();
            if state.joined {
                drop(state);
                return refused(
                    "a request can be in only one batch at a time, and this one is \
                                already in another",
                );
            }
            state.joined = true;
        }
        this.changes().count_for(Some(epoch));
        Ok(())
    }

    /// Makes sites serve the plan of a member, which cannot have extra hooks until it parts.
    pub fn serve(py: Python<'_>, frame: &Frame) -> PyResult<()> {
        if let Some(membership) = Self::of(frame) {
            membership.0.lock().in_sites = true;
        }
        if frame.has_own_hooks() {
            return Err(rows_error(py, SERVED));
        }
        Ok(())
    }

    /// Ends the membership of a batch.
    pub fn part(frame: &Frame) {
        frame.changes().count_for(None);
        if let Some(membership) = Self::of(frame) {
            let mut state = membership.0.lock();
            (state.joined, state.in_sites) = (false, false);
            let former = state.masks.take();
            drop(state);
            drop(former); // runs Python code
        }
    }

    /// Takes the programs of the last batch whose first member it was.
    pub fn take_programs(&self) -> Option<Box<ProgramCache>> {
        self.0.lock().programs.take()
    }

    /// Keeps the programs of a batch whose first member it was, unless the frame is closed.
    pub fn keep_programs(&self, programs: Box<ProgramCache>) {
        let mut state = self.0.lock();
        let dropped = if state.closed {
            Some(programs)
        } else {
            state.programs.replace(programs)
        };
        drop(state);
        drop(dropped); // runs Python code
    }
}

impl FrameSlot for Membership {
    fn check_hook(&self, py: Python<'_>, gradients: bool) -> PyResult<()> {
        let (joined, in_sites) = {
            let state = self.0.lock();
            (state.joined, state.in_sites)
        };
        if in_sites {
            return Err(rows_error(py, SERVED));
        }
        if joined && gradients {
            let message = "this request is in a batch, where backward hooks would get the \
                           gradients of all rows: it cannot have any";
            return Err(rows_error(py, message));
        }
        Ok(())
    }

    fn state(&self) -> Option<SlotState> {
        Some(self.masks_here()?)
    }

    fn begin_repeat(&self, state: SlotState) {
        if let Ok(masks) = state.downcast() {
            self.0.lock().repeats.begin(masks);
        }
    }

    fn end_repeat(&self) {
        let former = self.0.lock().repeats.end();
        drop(former); // runs Python code
    }

    fn close(&self) {
        self.0.lock().closed = true;
        drop(self.take_programs());
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.0.lock().programs {
            Some(programs) => programs.traverse(visit),
            None => Ok(()),
        }
    }
}
