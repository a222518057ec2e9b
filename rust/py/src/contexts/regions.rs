//! Regions of checkpointed functions: a forward is logged, and each repeat follows its log.
//!
//! A context variable holds the regions that are open in a context. While any is open in the process,
//! each phase of a call looks for it; no other call does. A hook that the checkpointed function
//! registers itself, or whose scope it enters itself, is inner: the repeat registers it anew.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use ferrohook_core::{HookId, Phase};
use parking_lot::Mutex;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::contexts::current::{self, active, variable_of};
use crate::contexts::frame::{Frame, FrameId};
use crate::contexts::log::{FrameRef, Logged, PhaseKind, PhaseLog, PhaseRun, Replay};
use crate::contexts::owners::{Firing, Owned};
use crate::cpython::once::Once;
use crate::error::hook_error;

/// Number of runs of regions in progress in the process.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// True if a region may be open in this context.
#[inline]
pub fn any_open() -> bool {
    // Relaxed: a context that has one open was entered by a thread that counted it.
    OPEN.load(Ordering::Relaxed) != 0
}

/// Phase of the calls of the module with an id.
type RegionPlace = (u64, Phase);

/// Log of a forward of a checkpointed function, for its repeats. Made right before the forward.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct ForwardLog {
    /// True if the forward runs without gradients, which only a repeat records.
    #[pyo3(get)]
    detached: bool,
    outside: Outside,
    complete: AtomicBool,
    /// The calls, in order.
    calls: Mutex<FxHashMap<RegionPlace, Vec<Arc<PhaseLog>>>>,
    /// True for each call that had a hook of a backward phase.
    taps: Mutex<FxHashMap<RegionPlace, Vec<bool>>>,
    /// Hooks in graphs of `torch.compile`.
    traced: Mutex<FxHashMap<RegionPlace, Arc<PhaseLog>>>,
    /// Hooks that the forward registered.
    registered: Mutex<FxHashSet<HookId>>,
}

/// Frames that were entered as the forward began.
#[derive(Default)]
struct Outside {
    frames: Vec<FrameRef>,
    ids: Arc<[FrameId]>,
}

impl Outside {
    fn now(py: Python<'_>) -> PyResult<Self> {
        let mut frames = Vec::new();
        for frame in active(py)?.iter() {
            if let Ok(frame) = frame.cast_into::<Frame>()
                && !frame.get().closed()
            {
                frames.push(FrameRef::of(&frame)?);
            }
        }
        Ok(Self {
            ids: frames.iter().map(|it| it.id).collect(),
            frames,
        })
    }

    fn has(&self, frame: FrameId) -> bool {
        self.ids.contains(&frame)
    }
}

/// A repeat that runs.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Repeat {
    /// Log of its forward.
    #[pyo3(get)]
    log: Py<ForwardLog>,
    /// Hooks that it registered.
    registered: Mutex<FxHashSet<HookId>>,
    /// Modules that stay instrumented for it, and the ids that they had in the forward.
    visited: Vec<(u64, Py<PyAny>)>,
    /// Numbers of the calls so far.
    calls: Mutex<FxHashMap<RegionPlace, usize>>,
    taps: Mutex<FxHashMap<RegionPlace, usize>>,
    gone: Arc<OnceLock<String>>,
}

impl ForwardLog {
    /// True if the checkpointed function registered the hook, or entered its owner.
    fn is_inner(&self, logged: &Logged) -> bool {
        let entered = |owner: &FrameRef| !self.outside.has(owner.id);
        logged.owner.as_ref().is_some_and(entered) || self.registered.lock().contains(&logged.id())
    }

    fn phases(&self) -> Vec<Arc<PhaseLog>> {
        let calls = self.calls.lock();
        let traced = self.traced.lock();
        let calls = calls.values().flatten();
        calls.chain(traced.values()).map(Arc::clone).collect()
    }

    /// Returns why a phase cannot run again: a hook is gone that has to run; None if it can.
    fn gone(&self, py: Python<'_>, phase: &PhaseLog) -> Option<String> {
        let needed = |logged: &&Logged| logged.entered() && logged.kind == PhaseKind::Changes;
        let mut whole = phase.whole.iter().filter(needed);
        if let Some(gone) = whole.find(|it| !self.is_inner(it) && it.get(py).is_none()) {
            return Some(gone.gone(py));
        }
        let (batch, members) = phase.members()?;
        if !self.outside.has(batch.id) {
            return None;
        }
        let left = batch.open(py).is_none();
        let mut members = members.iter().filter(needed);
        let gone = members.find(|it| left || it.get(py).is_none())?;
        Some(gone.gone(py))
    }

    /// Raises if a hook is gone that has to run again.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let phases = self.phases();
        let gone = phases.iter().find_map(|phase| self.gone(py, phase));
        gone.map_or(Ok(()), |gone| Err(hook_error(py, gone)))
    }

    /// Modules at whose calls a repeat does something in place of hooks, which may have left them, and
    /// their ids.
    fn visited(&self, py: Python<'_>) -> Vec<(u64, Py<PyAny>)> {
        let again = |phase: &Arc<PhaseLog>| phase.whole.iter().any(|it| it.again().is_some());
        let calls = self.calls.lock();
        let visited = calls.iter().filter_map(|((id, _), phases)| {
            let phase = phases.iter().find(|it| again(it))?;
            Some((*id, phase.module(py)?.unbind()))
        });
        visited.collect()
    }
}

impl Repeat {
    /// Takes the log of the next call of a module; None if the forward logged none.
    fn next(
        &self,
        module: &Bound<'_, PyAny>,
        place: RegionPlace,
    ) -> PyResult<Option<Arc<PhaseLog>>> {
        let calls = self.log.get().calls.lock();
        let visited = self.visited.iter().find(|(_, it)| it.is(module));
        let place = visited.map_or(place, |(id, _)| (*id, place.1));
        let Some(logs) = calls.get(&place) else {
            return Ok(None);
        };
        let mut taken = self.calls.lock();
        let number = taken.entry(place).or_default();
        *number += 1;
        let found = logs.get(*number - 1).map(Arc::clone);
        let runs = |log: &Arc<PhaseLog>| {
            let mut all = log.all();
            all.any(|it| it.entered() && it.kind == PhaseKind::Changes)
        };
        if found.is_none() && logs.iter().any(runs) {
            return Err(hook_error(
                module.py(),
                "backward() repeats a checkpointed forward, but the function called a module with \
                 hooks more often than in the forward: it is unknown which hooks belong to this \
                 call",
            ));
        }
        Ok(found)
    }

    /// Returns why hooks did not run that are gone, and their modules no longer instrumented.
    fn missed(&self, py: Python<'_>) -> Option<String> {
        let (calls, taken) = (self.log.get().calls.lock(), self.calls.lock());
        let left = calls.iter().flat_map(|(place, logs)| {
            let taken = taken.get(place).copied().unwrap_or_default();
            logs.iter().skip(taken)
        });
        let left: Vec<_> = left.map(Arc::clone).collect();
        drop((calls, taken));
        left.iter().find_map(|phase| self.log.get().gone(py, phase))
    }

    /// True if the repeated function registered the hook, or entered its owner.
    fn is_inner(&self, hook: &Owned<'_, '_>) -> bool {
        let entered = |it: &Bound<'_, Frame>| !self.log.get().outside.has(it.get().id());
        hook.owner.is_some_and(entered) || self.registered.lock().contains(&hook.entry.id())
    }

    /// Returns the hooks that run at a phase of a call: the logged ones, if it has a log. `live`: hooks
    /// of a call outside a repeat.
    fn firing<'py>(
        &self,
        py: Python<'py>,
        log: Option<Arc<PhaseLog>>,
        live: Option<&Firing<'py>>,
        observers: bool,
    ) -> PyResult<(Firing<'py>, Replay)> {
        let fires = |hook: &Owned<'_, 'py>| {
            let ended = |it: &Bound<'_, Frame>| it.get().ended_for(hook.entry.phase());
            hook.entry.enabled() && !hook.entry.removed() && !hook.owner.is_some_and(ended)
        };
        let known = log.is_some();
        let log = match log {
            Some(log) => log,
            None => Arc::new(PhaseLog::new(None, Vec::new())?),
        };
        let entered = log.whole.iter().filter(|it| it.entered());
        let inner = entered.filter(|it| self.log.get().is_inner(it)).count();
        let live = live.into_iter().flat_map(Firing::shared);
        let live = live.filter(|(hook, _)| self.is_inner(hook) && fires(hook));
        let live: Vec<_> = live.collect();
        if known && !live.is_empty() && live.len() != inner {
            let message = "backward() repeats a checkpointed forward, but the function registered \
                           other hooks than in the forward: it is unknown which ones belong to it";
            return Err(hook_error(py, message));
        }
        let (mut hooks, mut again, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (number, logged) in log.whole.iter().enumerate() {
            places.push(hooks.len());
            if !logged.entered() || (!live.is_empty() && self.log.get().is_inner(logged)) {
                continue;
            }
            if logged.kind == PhaseKind::Observes && !observers {
                if logged.again().is_some() {
                    again.push((hooks.len(), number));
                }
                continue;
            }
            match logged.get(py) {
                Some(hook) => hooks.push(hook),
                None if logged.kind == PhaseKind::Changes => {
                    return Err(hook_error(py, logged.gone(py)));
                }
                None => {}
            }
        }
        places.push(hooks.len());
        for (hook, entry) in live {
            let behind = hooks.iter().position(|(it, _)| entry.precedes(it));
            let at = behind.unwrap_or(hooks.len());
            hooks.insert(at, (Arc::clone(entry), hook.owner.cloned()));
            let moved = places
                .iter_mut()
                .chain(again.iter_mut().map(|it| &mut it.0));
            moved.filter(|it| **it > at).for_each(|it| *it += 1);
        }
        let replay = Replay {
            log,
            places,
            again,
            outside: Arc::clone(&self.log.get().outside.ids),
            gone: Arc::clone(&self.gone),
        };
        Ok((Firing::of(hooks), replay))
    }
}

/// The regions that are open in a context: never changed.
#[pyclass(frozen)]
pub struct Regions {
    /// Logs that are written.
    recording: Vec<Py<ForwardLog>>,
    /// Repeat around them.
    repeat: Option<Py<Repeat>>,
}

impl Regions {
    fn variable(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
        static VARIABLE: Once<Py<PyAny>> = Once::new();
        let none = || py.None().into_bound(py);
        variable_of(py, &VARIABLE, c"ferrohook_regions", none)
    }

    /// Returns the regions of this context; None if none is open.
    pub fn current(py: Python<'_>) -> PyResult<Option<Bound<'_, Self>>> {
        if !any_open() {
            return Ok(None);
        }
        let found = current::get(Self::variable(py)?)?;
        Ok(found.and_then(|it| it.cast_into().ok()))
    }

    /// Notes that code in the regions registered a hook.
    pub fn note_registered(&self, hook: HookId) {
        if let Some(repeat) = &self.repeat {
            repeat.get().registered.lock().insert(hook);
        }
        for log in &self.recording {
            log.get().registered.lock().insert(hook);
        }
    }

    /// True if these are hooks of a scope whose calls a repeat runs again.
    pub fn repeats(&self, owner: &Frame) -> bool {
        let repeat = self.repeat.as_ref();
        repeat.is_some_and(|it| it.get().log.get().outside.has(owner.id()))
    }

    /// Takes the hooks of a phase of a call that begins. `live`: hooks of a call outside a repeat.
    pub fn begin<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        place: RegionPlace,
        live: Option<Firing<'py>>,
    ) -> PyResult<Firing<'py>> {
        let py = module.py();
        let (mut firing, mut replay) = (live, None);
        if let Some(repeat) = self.repeat.as_ref().map(Py::get) {
            let log = repeat.next(module, place)?;
            let (again, found) = repeat.firing(py, log, firing.as_ref(), false)?;
            (firing, replay) = (Some(again), Some(found));
        }
        let mut record = None;
        if !self.recording.is_empty() {
            let again = replay.as_ref();
            let log = PhaseLog::new(Some(module), logged(py, firing.as_ref(), again)?)?;
            let log = record.insert(Arc::new(log));
            for each in &self.recording {
                let mut calls = each.get().calls.lock();
                calls.entry(place).or_default().push(Arc::clone(log));
            }
        }
        let mut run = PhaseRun::new(module.clone(), record, replay);
        run.restore();
        Ok(firing.unwrap_or_else(Firing::none).in_run(run))
    }

    /// True if the call has a hook of a backward phase. `live`: whether any other call has.
    pub fn taps(&self, place: RegionPlace, live: bool) -> bool {
        let mut taps = live;
        if let Some(repeat) = self.repeat.as_ref().map(Py::get) {
            let mut taken = repeat.taps.lock();
            let number = taken.entry(place).or_default();
            *number += 1;
            let logged = repeat.log.get().taps.lock();
            let found = logged.get(&place).and_then(|it| it.get(*number - 1));
            taps = found.copied().unwrap_or_default();
        }
        for log in &self.recording {
            log.get().taps.lock().entry(place).or_default().push(taps);
        }
        taps
    }

    /// True in a repeat.
    pub fn repeating(&self) -> bool {
        self.repeat.is_some()
    }

    /// Takes the hooks of a trace. `live`: hooks of a trace outside a repeat.
    pub fn traced<'py>(
        &self,
        py: Python<'py>,
        place: RegionPlace,
        live: Option<Firing<'py>>,
    ) -> PyResult<Option<Firing<'py>>> {
        let mut firing = live;
        if let Some(repeat) = self.repeat.as_ref().map(Py::get) {
            let log = repeat.log.get().traced.lock().get(&place).map(Arc::clone);
            firing = Some(repeat.firing(py, log, firing.as_ref(), true)?.0);
        }
        if !self.recording.is_empty() {
            let log = PhaseLog::new(None, logged(py, firing.as_ref(), None)?)?;
            for hook in firing.iter().flat_map(Firing::iter) {
                let fires = hook.entry.enabled() || self.repeating();
                if fires && !hook.entry.removed() {
                    log.note(py, hook.entry, hook.owner);
                }
            }
            let log = Arc::new(log);
            for each in &self.recording {
                each.get().traced.lock().insert(place, Arc::clone(&log));
            }
        }
        Ok(firing)
    }
}

/// Returns hooks as they are logged; of a second run, the observers too that have run before.
fn logged(
    py: Python<'_>,
    firing: Option<&Firing<'_>>,
    replay: Option<&Replay>,
) -> PyResult<Vec<Logged>> {
    let mut all = Vec::new();
    let mut again = replay.iter().flat_map(|it| &it.again).peekable();
    let fresh = |hook| replay.map(|it| it.log.whole.get(hook).fresh(py, 0));
    let hooks = firing.into_iter().flat_map(Firing::shared);
    for (number, (owned, entry)) in hooks.enumerate() {
        while let Some((_, hook)) = again.next_if(|(at, _)| *at <= number) {
            all.extend(fresh(*hook));
        }
        all.push(Logged::new(py, entry, owned.owner, 0)?);
    }
    all.extend(again.filter_map(|(_, hook)| fresh(*hook)));
    Ok(all)
}

#[pymethods]
impl ForwardLog {
    #[new]
    fn new(py: Python<'_>, detached: bool) -> PyResult<Self> {
        Ok(Self {
            detached,
            outside: Outside::now(py)?,
            complete: AtomicBool::default(),
            calls: Mutex::default(),
            taps: Mutex::default(),
            traced: Mutex::default(),
            registered: Mutex::default(),
        })
    }

    /// True once the forward has ended.
    #[getter]
    fn complete(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    /// Logs the forward that runs inside: a context manager.
    fn record(slf: &Bound<'_, Self>) -> RegionRun {
        RegionRun::new(slf, false)
    }

    /// Makes the code inside repeat the forward: a context manager.
    ///
    /// Raises:
    ///     HookError: a hook that ran is removed, or its scope left.
    fn repeat(slf: &Bound<'_, Self>) -> RegionRun {
        RegionRun::new(slf, true)
    }
}

/// Logs that a context writes, and the repeat that it runs.
type OpenRegions = (Vec<Py<ForwardLog>>, Option<Py<Repeat>>);

/// Returns the logs that this context writes, and the repeat that it runs.
#[pyfunction]
pub fn open_regions(py: Python<'_>) -> PyResult<OpenRegions> {
    let regions = Regions::current(py)?;
    let Some(regions) = regions.as_ref().map(Bound::get) else {
        return Ok((Vec::new(), None));
    };
    let written = regions.recording.iter().map(|log| log.clone_ref(py));
    let repeat = regions.repeat.as_ref().map(|it| it.clone_ref(py));
    Ok((written.collect(), repeat))
}

/// Context manager around a checkpointed forward or a repeat of it.
///
/// Native: in Python, Ctrl-C might land in the middle.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct RegionRun {
    log: Py<ForwardLog>,
    repeats: bool,
    entered: Mutex<Option<EnteredRegion>>,
}

struct EnteredRegion {
    /// Tokens of the changes of the context.
    regions: Py<PyAny>,
    frames: Option<Py<PyAny>>,
    /// Keeps modules instrumented.
    attachment: Option<Py<PyAny>>,
    repeat: Option<Py<Repeat>>,
}

impl RegionRun {
    fn new(log: &Bound<'_, ForwardLog>, repeats: bool) -> Self {
        Self {
            log: log.clone().unbind(),
            repeats,
            entered: Mutex::default(),
        }
    }

    fn begin(&self, py: Python<'_>) -> PyResult<EnteredRegion> {
        let log = self.log.get();
        let (mut frames, mut attachment, mut again) = (None, None, None);
        let regions = if self.repeats {
            log.check(py)?;
            let outside = log.outside.frames.iter();
            let all: Vec<_> = outside.filter_map(|frame| frame.get(py)).collect();
            let visited = log.visited(py);
            attachment = attach(py, &visited)?;
            frames = Some(current::set(&PyTuple::new(py, all)?)?.unbind());
            let repeat = Repeat {
                log: self.log.clone_ref(py),
                registered: Mutex::default(),
                visited,
                calls: Mutex::default(),
                taps: Mutex::default(),
                gone: Arc::default(),
            };
            let repeat = again.insert(Py::new(py, repeat)?);
            Regions {
                recording: Vec::new(),
                repeat: Some(repeat.clone_ref(py)),
            }
        } else {
            let around = Regions::current(py)?;
            let around = around.as_ref().map(Bound::get);
            let others = around.map_or(&[][..], |it| &it.recording);
            Regions {
                recording: others
                    .iter()
                    .chain([&self.log])
                    .map(|log| log.clone_ref(py))
                    .collect(),
                repeat: around
                    .and_then(|it| it.repeat.as_ref())
                    .map(|it| it.clone_ref(py)),
            }
        };
        let regions = Bound::new(py, regions)?.into_any();
        let regions = current::set_in(Regions::variable(py)?, &regions)?.unbind();
        OPEN.fetch_add(1, Ordering::Relaxed);
        Ok(EnteredRegion {
            regions,
            frames,
            attachment,
            repeat: again,
        })
    }
}

/// Instruments modules for as long as the result is not released; None for no modules.
fn attach(py: Python<'_>, modules: &[(u64, Py<PyAny>)]) -> PyResult<Option<Py<PyAny>>> {
    static ATTACH: Once<Py<PyAny>> = Once::new();
    if modules.is_empty() {
        return Ok(None);
    }
    let attach = ATTACH.import(py, "ferrohook.attach.instrument", "attach")?;
    let names = PyDict::new(py);
    for (id, module) in modules {
        names.set_item(id.to_string(), module)?;
    }
    let core = py.import(intern!(py, "ferrohook._core"))?;
    let attachment = core.getattr(intern!(py, "Attachment"))?.call0()?;
    attach.call1((names, &attachment))?;
    Ok(Some(attachment.unbind()))
}

#[pymethods]
impl RegionRun {
    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let entered = self.begin(py)?;
        *self.entered.lock() = Some(entered);
        Ok(())
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let Some(entered) = self.entered.lock().take() else {
            return Ok(());
        };
        OPEN.fetch_sub(1, Ordering::Relaxed);
        self.log.get().complete.store(true, Ordering::Relaxed);
        current::reset_in(Regions::variable(py)?, entered.regions.bind(py))?;
        if let Some(frames) = entered.frames {
            current::reset_in(current::variable(py)?, frames.bind(py))?;
        }
        if let Some(attachment) = entered.attachment {
            attachment.call_method0(py, intern!(py, "release"))?;
        }
        let gone = |it: Py<Repeat>| {
            let repeat = it.get();
            repeat.gone.get().cloned().or_else(|| repeat.missed(py))
        };
        let gone = entered.repeat.and_then(gone);
        gone.map_or(Ok(()), |gone| Err(hook_error(py, gone)))
    }

    // No `__clear__`: frames have one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &*self.entered.lock() {
            Some(entered) => {
                visit.call(&entered.regions)?;
                visit.call(&entered.frames)?;
                visit.call(&entered.attachment)
            }
            None => Ok(()),
        }
    }
}
