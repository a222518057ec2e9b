//! `Registry`: the core registry of one module, for Python, and the hooks that frames have for it.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrohook_core::{Entry, Phase, Placement, Work};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple};

use crate::contexts::current::{Frames, active};
use crate::contexts::frame::{self, Frame, ScopeArg};
use crate::contexts::owners::{Firing, Owned};
use crate::contexts::regions::{self, Regions};
use crate::contexts::scoped::Scoped;
use crate::hooks::handle::{HookHandle, Timeout, wait_interruptibly};
use crate::hooks::hook::Hook;
use crate::hooks::native::Native;
use crate::hooks::operators::Operators;
use crate::hooks::options::{HookOptions, OnError, PhaseName, Priority};
use crate::hooks::origin::Origin;
use crate::hooks::site::{Site, is_fault};
use crate::torch;

type CoreRegistry = ferrohook_core::Registry<Hook>;
type Snapshot = ferrohook_core::Snapshot<Hook>;

/// The ordered hooks of one module, all phases.
///
/// For Python's garbage collector it is the only owner of the hooks' callables.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Registry {
    /// Id of the module, the key of frames' hooks for it.
    module: u64,
    /// Hooks that fire in every context.
    hooks: CoreRegistry,
    scoped: Scoped,
    operators: Operators,
    /// Tensor of the id, made when first read.
    id_tensor: PyOnceLock<Py<PyAny>>,
    /// Number of exceptions raised in hooks, including frames' hooks and removed ones.
    errors: AtomicU64,
}

/// Calls that a hook fires in, and the line that registered it.
pub struct Audience<'a, 'py> {
    /// The calls in contexts that entered this scope; None: all calls.
    scope: Option<&'a ScopeArg<'py>>,
    place: Option<Origin>,
}

impl<'a, 'py> Audience<'a, 'py> {
    /// Whom the argument `scope=` of the Python code that runs means.
    pub fn of_caller(py: Python<'py>, scope: Option<&'a ScopeArg<'py>>) -> PyResult<Self> {
        let place = Origin::of_caller(py)?;
        Ok(Self { scope, place })
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Self {
        let place = self.place.as_ref().map(|place| place.clone_ref(py));
        Self { place, ..*self }
    }
}

impl Registry {
    fn new(hooks: CoreRegistry) -> Self {
        static MODULES: AtomicU64 = AtomicU64::new(0);
        Self {
            // Relaxed: the ids order nothing.
            module: MODULES.fetch_add(1, Ordering::Relaxed),
            hooks,
            scoped: Scoped::default(),
            operators: Operators::default(),
            id_tensor: PyOnceLock::new(),
            errors: AtomicU64::default(),
        }
    }

    /// A registry without hooks.
    pub fn empty() -> Self {
        Self::new(CoreRegistry::new())
    }

    /// Removes the hooks of one phase or of all, including hooks of scopes.
    pub fn clear(&self, phase: Option<Phase>) {
        self.hooks.clear(phase);
        for scoped in self.scoped.hooks() {
            scoped.clear(phase);
        }
    }

    /// Counts an exception of a hook, notes it with its owner, and applies its `on_error`: `Ok` if the call goes on without the hook.
    #[cold]
    pub fn apply_on_error<'py>(
        &self,
        site: &Site<'_, 'py>,
        owner: Option<&Bound<'py, Frame>>,
        error: PyErr,
    ) -> PyResult<()> {
        let py = site.module.py();
        if is_fault(py, &error) && !site.entry.last() {
            // Relaxed: a sum that orders nothing.
            self.errors.fetch_add(1, Ordering::Relaxed);
            if let Some(owner) = owner {
                owner.get().note_error(py, &error);
            }
        }
        site.apply_on_error(error)
    }

    /// Reads the work of a call: in each phase, while a region of a checkpointed function is open.
    #[inline]
    pub fn work(&self) -> Work {
        let work = self.hooks.work();
        if regions::any_open() {
            return work.watching();
        }
        work
    }

    /// Adds a hook, or returns an error and changes nothing. `name` is the module's, if known.
    pub fn register(
        &self,
        phase: Phase,
        hook: &Bound<'_, PyAny>,
        placement: Placement,
        options: HookOptions,
        audience: Audience<'_, '_>,
        name: Option<&str>,
    ) -> PyResult<HookHandle> {
        let py = hook.py();
        let mut hook = Hook::new(hook, phase, options, &self.hooks, name)?;
        hook.place = audience.place;
        let Some(ScopeArg(scope)) = audience.scope else {
            let hook = hook.register(py, phase, placement, &self.hooks);
            note_registered(py, &hook)?;
            return Ok(HookHandle::new(hook, None));
        };
        let scope = scope.get();
        let native = hook.native(py);
        if native.is_some_and(Native::operator) {
            scope.use_operators();
        }
        let backward = matches!(phase, Phase::BackwardPre | Phase::Backward);
        let backward = backward || native.is_some_and(Native::needs_gradients);
        scope.note_hook(py, backward, hook.runs_python(py))?;
        let hooks = scope.hooks_to_change(py, self.module, phase, &self.scoped, &self.hooks)?;
        let handle = hook.register(py, phase, placement, &hooks);
        // Another thread may have closed the frame meanwhile, without this hook.
        if let Err(closed) = scope.check_open(py) {
            handle.remove();
            return Err(closed);
        }
        scope.changes().note();
        note_registered(py, &handle)?;
        let changes = Arc::clone(scope.changes());
        Ok(HookHandle::new(handle, Some(changes)))
    }

    /// Takes the snapshot of a phase that begins: global hooks and hooks of the entered frames, in one
    /// order. None if there are none.
    #[inline]
    pub fn begin<'py>(
        &self,
        py: Python<'py>,
        phase: Phase,
        frames: &Frames<'py>,
    ) -> PyResult<Option<Firing<'py>>> {
        let work = self.work();
        if work.watched(phase)
            && let Some(frames) = frames.entered(py)?
        {
            return Ok(self.begin_in(phase, frames));
        }
        Ok(self.begin_outside(work, phase).map(Firing::global))
    }

    /// Takes the snapshot of a phase of a call in a region of a checkpointed function: `live`, unless
    /// the region is repeated.
    #[cold]
    #[inline(never)]
    pub fn begin_in_region<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        phase: Phase,
        live: Option<Firing<'py>>,
    ) -> PyResult<Option<Firing<'py>>> {
        match Regions::current(module.py())? {
            Some(regions) => {
                let place = (self.module, phase);
                regions.get().begin(module, place, live).map(Some)
            }
            None => Ok(live),
        }
    }

    fn begin_outside(&self, work: Work, phase: Phase) -> Option<Snapshot> {
        work.occupied(phase).then(|| self.hooks.snapshot(phase))
    }

    // Out of the walk of a call in no scope, as `fires_in`.
    #[inline(never)]
    fn begin_in<'py>(&self, phase: Phase, frames: &Bound<'py, PyTuple>) -> Option<Firing<'py>> {
        let of_frames = frame::hooks(frames, self.module, phase);
        Firing::merged(of_frames, self.begin_outside(self.work(), phase))
    }

    /// Takes the snapshot of a phase for the current context.
    fn firing<'py>(&self, py: Python<'py>, phase: Phase) -> PyResult<Option<Firing<'py>>> {
        let frames = frame::only_open(&active(py)?)?;
        self.begin(py, phase, &Frames::fixed(frames))
    }

    /// True if a phase has hooks that fire in `frames`; `work`: work of the call.
    #[inline]
    pub fn fires<'py>(
        &self,
        py: Python<'py>,
        work: Work,
        phase: Phase,
        frames: &Frames<'py>,
    ) -> PyResult<bool> {
        if work.watched(phase)
            && let Some(frames) = frames.entered(py)?
            && self.fires_in(phase, frames)
        {
            return Ok(true);
        }
        Ok(work.occupied(phase))
    }

    #[inline(never)]
    fn fires_in(&self, phase: Phase, frames: &Bound<'_, PyTuple>) -> bool {
        frame::hooks(frames, self.module, phase).any(|(owner, _)| !owner.get().closed())
    }

    /// True if a call in a region of a checkpointed function has hooks of a backward phase: `live`,
    /// unless the region is repeated.
    #[cold]
    #[inline(never)]
    pub fn taps_in_region(&self, py: Python<'_>, phase: Phase, live: bool) -> PyResult<bool> {
        let regions = Regions::current(py)?;
        Ok(regions.map_or(live, |it| it.get().taps((self.module, phase), live)))
    }
}

#[pymethods]
impl Registry {
    #[new]
    fn py_new() -> Self {
        Self::empty()
    }

    /// Id of the module: an int.
    #[getter]
    pub fn module(&self) -> u64 {
        self.module
    }

    /// Number of times that hooks raised an `Exception`, whatever their `on_error`.
    #[getter(errors)]
    fn py_errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Adds a hook of any phase.
    ///
    /// Raises:
    ///     HookTypeError: not a callable, a typed hook of another phase, or an option of the wrong
    ///         type.
    ///     ValueError: an unknown phase or `on_error`.
    ///     HookError: the scope was left.
    #[pyo3(
        name = "register",
        signature = (phase, hook, prepend = false, *, with_kwargs = false, always_call = false, priority = Priority(0), on_error = OnError::Raise, scope = None),
        text_signature = "($self, phase, hook, prepend=False, *, with_kwargs=False, always_call=False, priority=0, on_error='raise', scope=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the options, by keyword")]
    fn py_register(
        &self,
        phase: PhaseName,
        hook: &Bound<'_, PyAny>,
        prepend: bool,
        with_kwargs: bool,
        always_call: bool,
        priority: Priority,
        on_error: OnError,
        scope: Option<ScopeArg<'_>>,
    ) -> PyResult<HookHandle> {
        let options = HookOptions {
            with_kwargs,
            always_call,
            ..on_error.into()
        };
        let placement = priority.place(prepend);
        let audience = Audience::of_caller(hook.py(), scope.as_ref())?;
        self.register(phase.0, hook, placement, options, audience, None)
    }

    /// Lists the hooks of one phase or of all that fire in this context, in firing order: (id,
    /// phase, hook, priority, enabled, calls, failure) each.
    #[pyo3(signature = (phase = None))]
    fn list(&self, py: Python<'_>, phase: Option<PhaseName>) -> PyResult<Vec<Row>> {
        let mut rows = Vec::new();
        for each in selected(phase) {
            for Owned { entry, .. } in self.firing(py, each)?.iter().flat_map(Firing::iter) {
                if !entry.removed() && !entry.last() {
                    rows.push((
                        entry.id().get(),
                        each.name(),
                        entry.hook().object().clone_ref(py),
                        entry.priority(),
                        entry.enabled(),
                        entry.calls(),
                        entry.hook().failure().filter(|_| !entry.enabled()),
                    ));
                }
            }
        }
        Ok(rows)
    }

    /// Lists the hooks of every context by phase, in firing order: (hook, handle, place) each. The
    /// place is the file and the line of the registration, if known.
    fn global_hooks<'py>(&self, py: Python<'py>) -> PyResult<Vec<GlobalHook<'py>>> {
        let snapshots = Phase::ALL.map(|phase| self.hooks.snapshot(phase));
        let entries = snapshots.iter().flat_map(Snapshot::iter);
        let row = |entry: &Entry<Hook>| {
            let hook = entry.hook();
            let place = hook.place.as_ref();
            let place = place.map(|place| Ok::<_, PyErr>((place.file(py)?, place.line())));
            let handle = HookHandle::new(self.hooks.handle(entry), None);
            Ok((hook.object().bind(py).clone(), handle, place.transpose()?))
        };
        entries
            .filter(|entry| !entry.removed() && !entry.hook().hidden(py))
            .map(row)
            .collect()
    }

    /// Removes the hooks of one phase or of all; hooks of scopes too, if `scopes`.
    #[pyo3(name = "clear", signature = (phase = None, *, scopes = true))]
    fn py_clear(&self, phase: Option<PhaseName>, scopes: bool) {
        let phase = phase.map(|phase| phase.0);
        if scopes {
            self.clear(phase);
        } else {
            self.hooks.clear(phase);
        }
    }

    /// Waits until no thread is inside any of the hooks, including hooks of scopes and removed ones.
    ///
    /// Raises:
    ///     HookError: called from inside one of the hooks.
    ///     TimeoutError: a thread was still inside one after `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn quiesce(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let scoped = self.scoped.hooks();
        let active = scoped.iter().fold(self.hooks.active(), |active, hooks| {
            active.and(hooks.active())
        });
        wait_interruptibly(py, timeout, |timeout| active.wait_idle(timeout))
    }

    /// Makes another registry with the same hooks in the same order; `copy` makes their callables.
    pub fn fork(&self, copy: &Bound<'_, PyAny>) -> PyResult<Self> {
        let hooks = self.hooks.fork(|fork, phase, hook| {
            let copied = copy.call1((hook.object(),))?;
            let mut copied = Hook::new(&copied, phase, hook.options, fork, hook.module_name())?;
            copied.note_failure(hook.failure());
            copied.place = hook.place.as_ref().map(|place| place.clone_ref(copy.py()));
            Ok::<_, PyErr>(copied)
        })?;
        Ok(Self::new(hooks))
    }

    /// The hooks of a trace in this context, and True if a trace of them behaves like an eager
    /// call. For each phase the enabled ones in firing order, (callback, kind, with_kwargs) each,
    /// and after them the operators, if the context has a hook for any operator of any module: the
    /// graph is the same whichever of them have one. Their callback is (recorded part, key).
    #[getter]
    fn traced<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, bool)> {
        let frames = Frames::default();
        let operators = frames.entered(py)?.is_some_and(frame::any_operators);
        // A graph does not know whose rows the calls that run it have.
        let in_batch = frames.entered(py)?;
        let of_members =
            in_batch.is_some_and(|it| frame::any_of_others(it, self.module, &Phase::ALL));
        let (mut faithful, mut phases, mut snapshots) = (!of_members, Vec::new(), Vec::new());
        for phase in Phase::ALL {
            let mut rows = Vec::new();
            let mut snapshot = self.begin(py, phase, &frames)?;
            let mut repeats = false;
            if let Some(regions) = Regions::current(py)? {
                let place = (self.module, phase);
                snapshot = regions.get().traced(py, place, snapshot)?;
                repeats = regions.get().repeating();
            }
            for entry in fired(snapshot.as_ref(), repeats) {
                let Some(hook) = entry.hook().traced(py, phase)? else {
                    continue;
                };
                faithful &= hook.faithful;
                match hook.operator {
                    Some(key) if !hook.in_place => {
                        self.operators.lay(phase, key, hook.callback.unbind());
                    }
                    _ => rows.push((hook.callback, hook.kind, hook.with_kwargs)),
                }
            }
            if operators {
                let laid = self.operators.callbacks(py, phase).into_iter();
                rows.extend(laid.map(|callback| (callback, "recorder", false)));
            }
            phases.push(PyTuple::new(py, rows)?);
            snapshots.push((phase, snapshot));
        }
        if faithful {
            for (phase, snapshot) in &snapshots {
                let forward = matches!(phase, Phase::ForwardPre | Phase::Forward);
                // Without compiled autograd, backward hooks break the graph.
                if snapshot.is_some() && (forward || torch::compiles_backward(py)?) {
                    fired(snapshot.as_ref(), false).for_each(Entry::mark_traced);
                }
            }
        }
        Ok((PyTuple::new(py, phases)?, faithful))
    }

    /// The operators that have a hook in this context: (phase, key) each.
    #[getter]
    fn operating<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let mut keys = Vec::new();
        for phase in Phase::ALL {
            for entry in fired(self.firing(py, phase)?.as_ref(), false) {
                if let Some(key) = entry.hook().traced(py, phase)?.and_then(|it| it.operator) {
                    keys.push((phase.name(), key));
                }
            }
        }
        PyTuple::new(py, keys)
    }

    /// Id of the module as a tensor: an input, so that one graph serves many modules.
    #[getter]
    fn id_tensor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(tensor) = self.id_tensor.get(py) {
            return Ok(tensor.bind(py).clone());
        }
        // Not inside `get_or_init`: torch runs Python code.
        let tensor = torch::plain_int_tensor(py, self.module)?;
        let _ = self.id_tensor.set(py, tensor.unbind());
        self.id_tensor(py)
    }

    /// True if a call in this context has forward hooks, including recorders.
    #[getter]
    fn hooked(&self, py: Python<'_>) -> PyResult<bool> {
        let phases = [Phase::ForwardPre, Phase::Forward];
        if frame::any_of_others(&active(py)?, self.module, &phases) {
            return Ok(true);
        }
        for phase in phases {
            let snapshot = self.firing(py, phase)?;
            let mut hooks = snapshot.iter().flat_map(Firing::iter);
            if hooks.any(|hook| !hook.entry.removed()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hooks.visit(|hook| visit.call(hook.object()))?;
        self.operators.visit(&visit)
    }

    fn __clear__(&self) {
        self.operators.clear();
        self.hooks.clear_all();
    }
}

/// Notes a hook that code in a region of a checkpointed function registered.
fn note_registered(py: Python<'_>, hook: &ferrohook_core::Handle<Hook>) -> PyResult<()> {
    if regions::any_open()
        && let Some(regions) = Regions::current(py)?
    {
        regions.get().note_registered(hook.id());
    }
    Ok(())
}

/// Entries of a snapshot that a phase beginning now would enter. `repeats`: in a repeat, which runs
/// disabled ones and those of ended owners too.
fn fired<'a>(
    firing: Option<&'a Firing<'_>>,
    repeats: bool,
) -> impl Iterator<Item = &'a Entry<Hook>> {
    let hooks = firing.into_iter().flat_map(Firing::iter);
    let hooks = hooks
        .filter(move |it| !it.entry.removed() && (repeats || (it.entry.enabled() && !it.ended())));
    hooks.map(|it| it.entry)
}

type GlobalHook<'py> = (
    Bound<'py, PyAny>,
    HookHandle,
    Option<(Bound<'py, PyString>, c_int)>,
);

type Row = (u64, &'static str, Py<PyAny>, i64, bool, u64, Option<String>);

fn selected(phase: Option<PhaseName>) -> impl Iterator<Item = Phase> {
    Phase::ALL
        .into_iter()
        .filter(move |each| phase.as_ref().is_none_or(|wanted| wanted.0 == *each))
}
