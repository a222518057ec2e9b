//! Logs of checkpointed forwards: the hooks that ran in one phase of one call, and their second run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ferrohook_core::{Entry, HookId, Inside, Invocation};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use rustc_hash::FxHashMap;

use crate::contexts::frame::{Frame, FrameId, copied};
use crate::contexts::slot::{FrameSlot, SlotState};
use crate::hooks::hook::Hook;
use crate::hooks::native::Again;
use crate::hooks::site::Site;

/// Raises the hook's exception again.
struct Raises(PyErr);

impl Again for Raises {
    fn run<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        _args: &Bound<'py, PyTuple>,
        _kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Option<Arc<dyn Again>>> {
        Err(self.0.clone_ref(value.py()))
    }
}

/// Frame that a log names. Weak: autograd's graph, which owns the log, may outlive the frame; and
/// captures in the frame may keep the graph alive.
pub struct FrameRef {
    pub id: FrameId,
    frame: Py<PyWeakrefReference>,
}

impl FrameRef {
    pub fn of(frame: &Bound<'_, Frame>) -> PyResult<Self> {
        Ok(Self {
            id: frame.get().id(),
            frame: PyWeakrefReference::new(frame)?.unbind(),
        })
    }

    /// The frame; None once it is gone.
    pub fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, Frame>> {
        self.frame.bind(py).upgrade_as().ok()?
    }

    /// The frame, if it is there and open.
    pub fn open<'py>(&self, py: Python<'py>) -> Option<Bound<'py, Frame>> {
        self.get(py).filter(|frame| !frame.get().closed())
    }

    fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            id: self.id,
            frame: self.frame.clone_ref(py),
        }
    }
}

/// Ways in which a repeat treats a hook.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PhaseKind {
    /// Runs it; raises if it is gone, as it may change a value.
    Changes,
    /// Runs it, if it is there: Python code that observes.
    Python,
    /// Does not run it: it has observed the call already.
    Observes,
}

/// Hook that is kept beyond a phase, and the owner that it fires for.
pub type KeptHook<'py> = (Arc<Entry<Hook>>, Option<Bound<'py, Frame>>);

/// Hook, by its id, and the owner that it fires for.
pub type HookKey = (HookId, Option<FrameId>);

/// A hook in one phase of a call, and its effect.
pub struct Logged {
    /// Weak: a log keeps no hook.
    entry: Weak<Entry<Hook>>,
    id: HookId,
    pub owner: Option<FrameRef>,
    pub kind: PhaseKind,
    /// Number of hooks of the whole call ahead of it.
    pub ahead: usize,
    entered: AtomicBool,
    /// Describes the hook, if it was entered and changes values.
    label: OnceLock<String>,
    /// State that the hook found, and the frame that has it: the owner, or the hook's own.
    state: OnceLock<(FrameRef, SlotState)>,
    again: OnceLock<Arc<dyn Again>>,
}

impl Logged {
    pub fn new(
        py: Python<'_>,
        entry: &Arc<Entry<Hook>>,
        owner: Option<&Bound<'_, Frame>>,
        ahead: usize,
    ) -> PyResult<Self> {
        let hook = entry.hook();
        let kind = match (hook.changes(py), hook.runs_python(py)) {
            (true, _) => PhaseKind::Changes,
            (false, true) => PhaseKind::Python,
            (false, false) => PhaseKind::Observes,
        };
        let owner = owner.map(FrameRef::of).transpose()?;
        Ok(Self::of(
            Arc::downgrade(entry),
            entry.id(),
            owner,
            kind,
            ahead,
        ))
    }

    fn of(
        entry: Weak<Entry<Hook>>,
        id: HookId,
        owner: Option<FrameRef>,
        kind: PhaseKind,
        ahead: usize,
    ) -> Self {
        Self {
            entry,
            id,
            owner,
            kind,
            ahead,
            entered: AtomicBool::new(false),
            label: OnceLock::new(),
            state: OnceLock::new(),
            again: OnceLock::new(),
        }
    }

    /// The same hook, for the log of another run.
    pub fn fresh(&self, py: Python<'_>, ahead: usize) -> Self {
        let owner = self.owner.as_ref().map(|owner| owner.clone_ref(py));
        Self::of(Weak::clone(&self.entry), self.id, owner, self.kind, ahead)
    }

    pub fn id(&self) -> HookId {
        self.id
    }

    pub fn key(&self) -> HookKey {
        (self.id, self.owner.as_ref().map(|owner| owner.id))
    }

    pub fn entered(&self) -> bool {
        self.entered.load(Ordering::Relaxed) // orders nothing
    }

    /// The hook and its owner; None once one of them is gone.
    pub fn get<'py>(&self, py: Python<'py>) -> Option<KeptHook<'py>> {
        let entry = self.entry.upgrade().filter(|entry| !entry.removed())?;
        let owner = match &self.owner {
            Some(owner) => Some(owner.open(py)?),
            None => None,
        };
        Some((entry, owner))
    }

    /// The stand-in that a repeat runs, if there is one.
    pub fn again(&self) -> Option<&Arc<dyn Again>> {
        self.again.get()
    }

    /// Message of the error that the hook cannot run again.
    pub fn gone(&self, py: Python<'_>) -> String {
        let unnamed = || format!("hook with id {}", self.id);
        let label = self.label.get().cloned().unwrap_or_else(unnamed);
        let left = self.owner.as_ref().is_some_and(|it| it.open(py).is_none());
        let (what, instead) = if left {
            ("scope whose hooks ran in it was left", "inside the scope")
        } else {
            (
                "hook that ran in it was removed, or its batch was left",
                "before that",
            )
        };
        format!(
            "backward() repeats a checkpointed forward, but the {what}: without the {label} the \
             gradient would be wrong. Call backward() {instead}"
        )
    }

    /// Notes that the hook is entered for a call of `module`.
    pub fn note(
        &self,
        py: Python<'_>,
        entry: &Entry<Hook>,
        owner: Option<&Bound<'_, Frame>>,
        module: Option<&Bound<'_, PyAny>>,
    ) {
        if self.entered.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(module) = module.filter(|_| self.kind == PhaseKind::Changes) {
            let _ = self.label.set(Site { entry, module }.describe());
        }
        let own = entry.hook().native(py).and_then(|it| it.state_of(py));
        let frame = own.as_ref().and_then(|it| it.cast().ok()).or(owner);
        if let Some(frame) = frame
            && let Some(state) = frame.get().slot().and_then(FrameSlot::state)
            && let Ok(frame) = FrameRef::of(frame)
        {
            let _ = self.state.set((frame, state));
        }
    }
}

/// Hooks of one phase of a call, in firing order.
pub struct LoggedHooks {
    list: Box<[Logged]>,
    places: FxHashMap<HookKey, usize>,
}

impl LoggedHooks {
    pub fn new(list: Vec<Logged>) -> Self {
        let places = list.iter().enumerate().map(|(at, it)| (it.key(), at));
        Self {
            places: places.collect(),
            list: list.into(),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Logged> {
        self.list.iter()
    }

    pub fn get(&self, at: usize) -> &Logged {
        &self.list[at]
    }

    fn find(&self, key: &HookKey) -> Option<&Logged> {
        self.places.get(key).map(|at| &self.list[*at])
    }
}

/// Log of one phase of one call.
pub struct PhaseLog {
    module: Option<Py<PyWeakrefReference>>,
    pub whole: LoggedHooks,
    /// Batch, and hooks of its members.
    members: OnceLock<(FrameRef, LoggedHooks)>,
    /// Members that failed, with the reasons.
    failed: Mutex<Vec<(FrameId, PyErr)>>,
}

impl PhaseLog {
    pub fn new(module: Option<&Bound<'_, PyAny>>, whole: Vec<Logged>) -> PyResult<Self> {
        let module = module.map(PyWeakrefReference::new).transpose()?;
        Ok(Self {
            module: module.map(Bound::unbind),
            whole: LoggedHooks::new(whole),
            members: OnceLock::new(),
            failed: Mutex::default(),
        })
    }

    /// Notes that a hook is entered.
    pub fn note(&self, py: Python<'_>, entry: &Entry<Hook>, owner: Option<&Bound<'_, Frame>>) {
        let key = (entry.id(), owner.map(|it| it.get().id()));
        if let Some(logged) = self.find(&key) {
            logged.note(py, entry, owner, None);
        }
    }

    /// The called module; None once it is gone.
    pub fn module<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.module.as_ref()?.bind(py).upgrade()
    }

    /// Batch, and hooks of its members; None outside of a batch.
    pub fn members(&self) -> Option<(&FrameRef, &LoggedHooks)> {
        self.members.get().map(|(batch, hooks)| (batch, hooks))
    }

    /// Hooks of the whole call and of members.
    pub fn all(&self) -> impl Iterator<Item = &Logged> {
        let members = self.members.get().into_iter();
        let members = members.flat_map(|(_, hooks)| hooks.iter());
        self.whole.iter().chain(members)
    }

    fn find(&self, key: &HookKey) -> Option<&Logged> {
        let of_members = || self.members.get()?.1.find(key);
        self.whole.find(key).or_else(of_members)
    }
}

/// Second run of a phase.
pub struct Replay {
    pub log: Arc<PhaseLog>,
    /// Number of hooks before it that run again, for each hook of the whole call and for the end.
    pub places: Vec<usize>,
    /// Hooks of the whole call for which something else runs, before the hook with a number.
    pub again: Vec<(usize, usize)>,
    /// Frames that were entered as the forward began.
    pub outside: Arc<[FrameId]>,
    /// Takes the reason, if a hook turns out to be gone.
    pub gone: Arc<OnceLock<String>>,
}

/// A phase of a call in a checkpointed forward or in its repeat.
pub struct PhaseRun<'py> {
    module: Bound<'py, PyAny>,
    /// Log that is written, for the open regions.
    record: Option<Arc<PhaseLog>>,
    /// Log that a repeat follows.
    replay: Option<Replay>,
    /// Frames that have their former state until the phase ends.
    restored: Vec<Bound<'py, Frame>>,
}

impl<'py> PhaseRun<'py> {
    pub fn new(
        module: Bound<'py, PyAny>,
        record: Option<Arc<PhaseLog>>,
        replay: Option<Replay>,
    ) -> Self {
        Self {
            module,
            record,
            replay,
            restored: Vec::new(),
        }
    }

    /// Gives the frames the state that the hooks found, until the phase ends.
    pub fn restore(&mut self) {
        let py = self.module.py();
        let Some(replay) = &self.replay else { return };
        for logged in replay.log.all() {
            let found = logged
                .state
                .get()
                .and_then(|it| Some((it.0.get(py)?, &it.1)));
            if let Some((frame, state)) = found
                && let Some(slot) = frame.get().slot()
                && !self.restored.iter().any(|it| it.is(&frame))
            {
                slot.begin_repeat(Arc::clone(state));
                self.restored.push(frame);
            }
        }
    }

    /// The second run, in a repeat.
    pub fn replay(&self) -> Option<&Replay> {
        self.replay.as_ref()
    }

    /// Notes the hooks of a batch's members, if a log is written.
    pub fn add_members(
        &self,
        batch: &Bound<'py, Frame>,
        hooks: impl FnOnce() -> PyResult<Vec<Logged>>,
    ) -> PyResult<()> {
        if let Some(record) = &self.record {
            let _ = record
                .members
                .set((FrameRef::of(batch)?, LoggedHooks::new(hooks()?)));
        }
        Ok(())
    }

    /// Record of a hook, if a log is written.
    fn recorded(&self, id: HookId, owner: Option<FrameId>) -> Option<&Logged> {
        self.record.as_ref()?.find(&(id, owner))
    }

    /// Enters a hook whose turn comes: in a repeat the ones that were entered in the forward, in the
    /// state that they had.
    pub fn enter<'a>(
        &self,
        entry: &'a Entry<Hook>,
        owner: Option<&Bound<'py, Frame>>,
        inside: &'a Inside,
    ) -> Option<Invocation<'a>> {
        let key = (entry.id(), owner.map(|it| it.get().id()));
        let logged = self
            .replay
            .as_ref()
            .and_then(|it| Some((it, it.log.find(&key)?)));
        let invocation = match logged {
            Some((_, logged)) if !logged.entered() || logged.kind == PhaseKind::Observes => {
                return None;
            }
            Some((replay, logged)) => {
                let closed = owner.is_some_and(|owner| owner.get().closed());
                let entered = if closed {
                    None
                } else {
                    entry.enter_disabled(inside)
                };
                if entered.is_none() && logged.kind == PhaseKind::Changes {
                    let _ = replay.gone.set(logged.gone(self.module.py()));
                }
                entered?
            }
            // Registered by the checkpointed function itself, or no repeat.
            None if owner.is_some_and(|it| it.get().ended_for(entry.phase())) => return None,
            None => entry.enter(inside)?,
        };
        if let Some(logged) = self.recorded(key.0, key.1) {
            logged.note(self.module.py(), entry, owner, Some(&self.module));
        }
        Some(invocation)
    }

    /// Notes the stand-in that a repeat runs for a hook that only observes.
    pub fn note_again(
        &self,
        entry: &Entry<Hook>,
        owner: Option<&Bound<'py, Frame>>,
        again: Arc<dyn Again>,
    ) {
        if let Some(logged) = self.recorded(entry.id(), owner.map(|it| it.get().id())) {
            let _ = logged.again.set(again);
        }
    }

    /// Notes the exception of a hook that ends the call: a repeat raises it too where it does not run
    /// the hook.
    pub fn note_error(
        &self,
        entry: &Entry<Hook>,
        owner: Option<&Bound<'py, Frame>>,
        error: &PyErr,
    ) {
        if let Some(logged) = self.recorded(entry.id(), owner.map(|it| it.get().id()))
            && logged.kind == PhaseKind::Observes
        {
            let raises = Raises(copied(self.module.py(), error));
            let _ = logged.again.set(Arc::new(raises));
        }
    }

    /// Runs what stands for a hook in a repeat.
    pub fn run_again(
        &self,
        hook: usize,
        value: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        let hook = self.replay.as_ref().map(|it| it.log.whole.get(hook));
        let Some((hook, again)) = hook.and_then(|it| Some((it, it.again()?))) else {
            return Ok(());
        };
        let more = again.run(value, args, kwargs);
        let (id, owner) = hook.key();
        if let Some(logged) = self.recorded(id, owner) {
            logged.entered.store(true, Ordering::Relaxed);
            if let Some(next) = more.as_ref().map_or(Some(again), Option::as_ref) {
                let _ = logged.again.set(Arc::clone(next));
            }
        }
        more.map(drop)
    }

    /// Notes that a member failed.
    pub fn note_failure(&self, member: &Frame, py: Python<'_>, error: &PyErr) {
        if let Some(record) = &self.record {
            let mut failed = record.failed.lock();
            failed.push((member.id(), copied(py, error)));
        }
    }

    /// Raises the error with which a member failed in the forward.
    pub fn fail_again(&self, member: &Frame, py: Python<'_>) -> PyResult<()> {
        let Some(replay) = &self.replay else {
            return Ok(());
        };
        let failed = replay.log.failed.lock();
        let error = failed.iter().find(|(id, _)| *id == member.id());
        error.map_or(Ok(()), |(_, error)| Err(error.clone_ref(py)))
    }
}

impl Drop for PhaseRun<'_> {
    fn drop(&mut self) {
        for frame in self.restored.drain(..) {
            if let Some(slot) = frame.get().slot() {
                slot.end_repeat();
            }
        }
    }
}
