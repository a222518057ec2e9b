//! `Registry`: a core registry for Python, and the walk of its backward phases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ferrohook_core::{Phase, Placement};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call::backward;
use crate::contexts::scope::{self, ScopeArg, Scoped, Scopes};
use crate::hooks::handle::{HookHandle, Timeout, wait_interruptibly};
use crate::hooks::hook::{Callback, Hook, OnError, Options, PhaseName, Priority};
use crate::recorded::{InstallationBase, Reason, RecordedLayerBase, Recordings};

type CoreRegistry = ferrohook_core::Registry<Hook>;
type Snapshot = ferrohook_core::Snapshot<Hook>;

/// The ordered hooks of one module, all phases.
///
/// The only owner of the hooks' callables as far as Python's garbage collector is concerned.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Registry {
    /// The module's number, by which scopes know it.
    module: u64,
    /// The hooks that fire in every context.
    hooks: CoreRegistry,
    scoped: Scoped,
    recordings: Recordings,
    /// How many hooks need to know how long the module runs.
    clocks: Arc<AtomicUsize>,
    /// How often hooks raised, those of scopes and those removed since included.
    errors: AtomicU64,
}

impl Registry {
    fn new(hooks: CoreRegistry, clocks: Arc<AtomicUsize>) -> Self {
        static MODULES: AtomicU64 = AtomicU64::new(0);
        Self {
            // Relaxed: the numbers order nothing.
            module: MODULES.fetch_add(1, Ordering::Relaxed),
            hooks,
            scoped: Scoped::default(),
            recordings: Recordings::default(),
            clocks,
            errors: AtomicU64::default(),
        }
    }

    pub fn count_error(&self) {
        // Relaxed: a sum that orders nothing.
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a hook needs to know how long the module runs.
    #[inline]
    pub fn timed(&self) -> bool {
        // Relaxed: see `Clock`.
        self.clocks.load(Ordering::Relaxed) > 0
    }

    pub fn module(&self) -> u64 {
        self.module
    }

    /// Whether a call has nothing to do but to run the module: no hooks, no scope that has any, no
    /// recording.
    #[inline]
    pub fn idle(&self) -> bool {
        self.hooks.idle()
    }

    /// The recordings that the module is a layer of.
    #[inline]
    pub fn recordings(&self) -> Option<Arc<[Py<RecordedLayerBase>]>> {
        self.recordings.now()
    }

    /// Adds a hook, or refuses it and leaves all as it was.
    pub fn register(
        &self,
        phase: Phase,
        hook: &Bound<'_, PyAny>,
        placement: Placement,
        options: Options,
        scope: Option<&ScopeArg<'_>>,
    ) -> PyResult<HookHandle> {
        let py = hook.py();
        let hook = Hook::new(hook, phase, options, &self.clocks)?;
        let Some(ScopeArg(scope)) = scope else {
            return Ok(HookHandle(self.hooks.register(phase, hook, placement)));
        };
        let scope = scope.get();
        let hooks = scope.hooks_to_change(py, self.module, phase, &self.scoped, &self.hooks)?;
        let handle = hooks.register(phase, hook, placement);
        // It may have been closed in the meantime, without this hook.
        if let Err(closed) = scope.check_open(py) {
            handle.remove();
            return Err(closed);
        }
        Ok(HookHandle(handle))
    }

    /// The snapshot of a phase that begins: the hooks that fire in every context and those of the
    /// entered scopes, in one order. None where there are none.
    #[inline]
    pub fn begin<'py>(
        &self,
        py: Python<'py>,
        phase: Phase,
        scopes: &Scopes<'py>,
    ) -> PyResult<Option<Snapshot>> {
        if self.scoped.any(phase)
            && let Some(scopes) = scopes.entered(py)?
        {
            return Ok(self.begin_in(phase, scopes));
        }
        Ok(self.begin_outside(phase))
    }

    fn begin_outside(&self, phase: Phase) -> Option<Snapshot> {
        let occupied = self.hooks.occupied(phase);
        occupied.then(|| self.hooks.snapshot(phase))
    }

    fn begin_in(&self, phase: Phase, scopes: &Bound<'_, PyTuple>) -> Option<Snapshot> {
        let mut snapshots = scope::hooks(scopes, self.module)
            .filter(|hooks| hooks.occupied(phase))
            .map(|hooks| hooks.snapshot(phase))
            .chain(self.begin_outside(phase));
        let first = snapshots.next()?;
        let Some(second) = snapshots.next() else {
            return Some(first);
        };
        let all: Vec<_> = [first, second].into_iter().chain(snapshots).collect();
        Some(Snapshot::merged(&all))
    }

    /// The hooks of a phase that fire in this context.
    fn firing(&self, py: Python<'_>, phase: Phase) -> PyResult<Option<Snapshot>> {
        self.begin(py, phase, &Scopes::default())
    }

    /// Whether `begin` would give a snapshot.
    #[inline]
    pub fn occupied<'py>(
        &self,
        py: Python<'py>,
        phase: Phase,
        scopes: &Scopes<'py>,
    ) -> PyResult<bool> {
        if self.scoped.any(phase)
            && let Some(scopes) = scopes.entered(py)?
            && scope::hooks(scopes, self.module).any(|hooks| hooks.occupied(phase))
        {
            return Ok(true);
        }
        Ok(self.hooks.occupied(phase))
    }
}

#[pymethods]
impl Registry {
    #[new]
    fn py_new() -> Self {
        Self::new(CoreRegistry::new(), Arc::default())
    }

    /// The module's number, by which captures know it.
    #[getter(module)]
    fn py_module(&self) -> u64 {
        self.module
    }

    /// How often hooks raised an `Exception`, whatever their `on_error`.
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
        signature = (phase, hook, *, prepend = false, with_kwargs = false, always_call = false, priority = Priority(0), on_error = OnError::Raise, timed = false, scope = None),
        text_signature = "($self, phase, hook, *, prepend=False, with_kwargs=False, always_call=False, priority=0, on_error='raise', timed=False, scope=None)"
    )]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "the options, by keyword"
    )]
    fn py_register(
        &self,
        phase: PhaseName,
        hook: &Bound<'_, PyAny>,
        prepend: bool,
        with_kwargs: bool,
        always_call: bool,
        priority: Priority,
        on_error: OnError,
        timed: bool,
        scope: Option<ScopeArg<'_>>,
    ) -> PyResult<HookHandle> {
        let options = Options {
            with_kwargs,
            always_call,
            on_error,
            timed,
        };
        let placement = priority.place(prepend);
        self.register(phase.0, hook, placement, options, scope.as_ref())
    }

    /// The hooks of one phase or of all that fire in this context: (id, phase, hook, priority,
    /// enabled, calls, seconds) each, in firing order.
    #[pyo3(signature = (phase = None))]
    fn list(&self, py: Python<'_>, phase: Option<PhaseName>) -> PyResult<Vec<Row>> {
        let mut rows = Vec::new();
        for each in selected(phase) {
            for entry in self.firing(py, each)?.iter().flat_map(Snapshot::iter) {
                if !entry.removed() {
                    rows.push((
                        entry.id().get(),
                        each.name(),
                        entry.hook().given().clone_ref(py),
                        entry.priority(),
                        entry.enabled(),
                        entry.calls(),
                        entry.hook().seconds(),
                    ));
                }
            }
        }
        Ok(rows)
    }

    /// What is registered for every context, with a handle for each: those of a copy, which
    /// `register` never returned.
    fn handles(&self, py: Python<'_>) -> Vec<(Py<PyAny>, HookHandle)> {
        let snapshots = Phase::ALL.map(|phase| self.hooks.snapshot(phase));
        let entries = snapshots.iter().flat_map(Snapshot::iter);
        let with_handle = |entry: &ferrohook_core::Entry<Hook>| {
            let given = entry.hook().given().clone_ref(py);
            (given, HookHandle(self.hooks.handle(entry)))
        };
        entries
            .filter(|entry| !entry.removed())
            .map(with_handle)
            .collect()
    }

    /// Removes the hooks of one phase or of all, those of scopes included.
    #[pyo3(signature = (phase = None))]
    fn clear(&self, phase: Option<PhaseName>) {
        let phase = phase.map(|phase| phase.0);
        self.hooks.clear(phase);
        for scoped in self.scoped.hooks() {
            scoped.clear(phase);
        }
    }

    /// Waits until no thread is inside any of the hooks, those of scopes and those removed before
    /// included.
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

    /// Another registry with the same hooks in the same order; `copy` makes their callables.
    pub fn fork(&self, copy: &Bound<'_, PyAny>) -> PyResult<Self> {
        let clocks = Arc::default();
        let hooks = self.hooks.fork(|phase, hook| {
            let copied = copy.call1((hook.given(),))?;
            Hook::new(&copied, phase, hook.options, &clocks)
        })?;
        Ok(Self::new(hooks, clocks))
    }

    /// What `torch.compile` traces instead of a call in this context: for each phase the enabled
    /// hooks in firing order, (callback, kind, with_kwargs) each; and whether tracing can do as
    /// their options say. For a recorder the callback is the part that is recorded.
    #[getter]
    fn traced<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, bool)> {
        let mut traceable = true;
        let mut phases = Vec::new();
        for phase in Phase::ALL {
            let mut rows = Vec::new();
            for entry in self.firing(py, phase)?.iter().flat_map(Snapshot::iter) {
                if !entry.enabled() || entry.removed() {
                    continue;
                }
                let hook = entry.hook();
                traceable &= hook.options.traceable();
                let (callback, kind) = match hook.callback(py) {
                    Callback::Plain(callback) => (callback.clone(), "plain"),
                    Callback::Point(hook) => (hook.as_any().clone(), "plain"),
                    Callback::Typed(callback) => (callback.clone(), "typed"),
                    Callback::Recorder(recorder) => {
                        let (part, in_graph) = recorder.get().traced(py);
                        traceable &= in_graph;
                        (part, "recorder")
                    }
                    // Reads memory, which a graph knows nothing of.
                    Callback::Detector(detector) => {
                        traceable = false;
                        (detector.as_any().clone(), "detector")
                    }
                };
                rows.push((callback, kind, hook.options.with_kwargs).into_pyobject(py)?);
            }
            let recordings = self.recordings.now().filter(|_| phase == Phase::Forward);
            for layer in recordings.iter().flat_map(|layers| layers.iter()) {
                // What an eager call records, the native call has to.
                let reason = layer.get().reason(py, &Scopes::default())?;
                traceable &= !matches!(reason, Reason::Call(_));
                rows.push((layer, "plain", true).into_pyobject(py)?);
            }
            phases.push(PyTuple::new(py, rows)?);
        }
        Ok((PyTuple::new(py, phases)?, traceable))
    }

    /// Whether the phases `backward_pre` and `backward` have hooks that fire in `scopes`.
    fn occupied_backward(
        &self,
        py: Python<'_>,
        scopes: Bound<'_, PyTuple>,
    ) -> PyResult<(bool, bool)> {
        let scopes = Scopes::given(scopes);
        Ok((
            self.occupied(py, Phase::BackwardPre, &scopes)?,
            self.occupied(py, Phase::Backward, &scopes)?,
        ))
    }

    /// Walks the `backward_pre` phase of one call that was made in `scopes`: the gradient of the
    /// module's output as the hooks leave it, or None where none replaces it.
    fn run_backward_pre<'py>(
        &self,
        scopes: Bound<'py, PyTuple>,
        module: &Bound<'py, PyAny>,
        grad_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let snapshot = self.begin(module.py(), Phase::BackwardPre, &Scopes::given(scopes))?;
        backward::run(self, snapshot, module, grad_output, None)
    }

    /// Walks the `backward` phase of one call that was made in `scopes`: the gradient of the
    /// module's input as the hooks leave it, or None where none replaces it.
    fn run_backward<'py>(
        &self,
        scopes: Bound<'py, PyTuple>,
        module: &Bound<'py, PyAny>,
        grad_input: &Bound<'py, PyAny>,
        grad_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let snapshot = self.begin(module.py(), Phase::Backward, &Scopes::given(scopes))?;
        backward::run(self, snapshot, module, grad_input, Some(grad_output))
    }

    /// Has the module's outputs recorded, as a layer of a model.
    fn record(&self, layer: &Bound<'_, RecordedLayerBase>) {
        self.recordings.add(layer, &self.hooks);
    }

    /// Undoes it for the layers of an installation.
    fn unrecord(&self, installation: &Bound<'_, InstallationBase>) {
        self.recordings.remove(installation, &self.hooks);
    }

    /// Whether the module's outputs are recorded.
    #[getter]
    fn recorded(&self) -> bool {
        self.recordings.now().is_some()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.recordings.traverse(&visit)?;
        self.hooks.visit(|hook| visit.call(hook.given()))
    }

    fn __clear__(&self) {
        self.hooks.clear(None);
    }
}

type Row = (u64, &'static str, Py<PyAny>, i64, bool, u64, Option<f64>);

fn selected(phase: Option<PhaseName>) -> impl Iterator<Item = Phase> {
    Phase::ALL
        .into_iter()
        .filter(move |each| phase.as_ref().is_none_or(|wanted| wanted.0 == *each))
}
