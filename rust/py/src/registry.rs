//! `Registry`: a core registry for Python, and the walk of its backward phases.

use ferrohook_core::{Phase, Placement};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::backward;
use crate::handle::{HookHandle, Timeout, wait_interruptibly};
use crate::hook::{Hook, Options, PhaseName};

type CoreRegistry = ferrohook_core::Registry<Hook>;

/// The ordered hooks of one module, all phases.
///
/// The only owner of the hooks' callables as far as Python's garbage collector is concerned.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct Registry {
    pub hooks: CoreRegistry,
}

impl Registry {
    pub fn new() -> Self {
        Self {
            hooks: CoreRegistry::new(),
        }
    }

    /// Adds a hook, or refuses it and leaves the registry as it was.
    pub fn register(
        &self,
        phase: Phase,
        hook: &Bound<'_, PyAny>,
        placement: Placement,
        options: Options,
    ) -> PyResult<HookHandle> {
        let hook = Hook::new(hook, phase, options)?;
        Ok(HookHandle(self.hooks.register(phase, hook, placement)))
    }
}

#[pymethods]
impl Registry {
    #[new]
    fn py_new() -> Self {
        Self::new()
    }

    /// The hooks of one phase or of all: (id, phase, hook, priority, enabled, calls) each, in
    /// firing order.
    #[pyo3(signature = (phase = None))]
    fn list(&self, py: Python<'_>, phase: Option<PhaseName>) -> Vec<Row> {
        let mut rows = Vec::new();
        for each in selected(phase) {
            for entry in self.hooks.snapshot(each).iter() {
                if !entry.removed() {
                    rows.push((
                        entry.id().get(),
                        each.name(),
                        entry.hook().given().clone_ref(py),
                        entry.priority(),
                        entry.enabled(),
                        entry.calls(),
                    ));
                }
            }
        }
        rows
    }

    /// Removes the hooks of one phase or of all.
    #[pyo3(signature = (phase = None))]
    fn clear(&self, phase: Option<PhaseName>) {
        self.hooks.clear(phase.map(|phase| phase.0));
    }

    /// Waits until no thread is inside any of the hooks, those removed before included.
    ///
    /// Raises:
    ///     HookError: called from inside one of the hooks.
    ///     TimeoutError: a thread was still inside one after `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn quiesce(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let active = self.hooks.active();
        wait_interruptibly(py, timeout, |timeout| active.wait_idle(timeout))
    }

    /// Another registry with the same hooks in the same order; `copy` makes their callables.
    fn fork(&self, copy: &Bound<'_, PyAny>) -> PyResult<Self> {
        let hooks = self
            .hooks
            .fork(|phase, hook| Hook::new(&copy.call1((hook.given(),))?, phase, hook.options))?;
        Ok(Self { hooks })
    }

    /// What `torch.compile` traces instead of the call: for each phase the enabled hooks in firing
    /// order, (callback, typed, with_kwargs) each; and whether tracing can do as their options say.
    #[getter]
    fn traced<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, bool)> {
        let mut traceable = true;
        let mut phases = Vec::new();
        for phase in Phase::ALL {
            let mut rows = Vec::new();
            for entry in self.hooks.snapshot(phase).iter() {
                if entry.enabled() && !entry.removed() {
                    let hook = entry.hook();
                    let (callback, typed) = hook.callback(py);
                    traceable &= hook.options.traceable();
                    rows.push((callback, typed, hook.options.with_kwargs).into_pyobject(py)?);
                }
            }
            phases.push(PyTuple::new(py, rows)?);
        }
        Ok((PyTuple::new(py, phases)?, traceable))
    }

    /// Whether any hook of the phase may fire.
    fn occupied(&self, phase: PhaseName) -> bool {
        self.hooks.occupied(phase.0)
    }

    /// Walks the `backward_pre` phase of one call: the gradient of the module's output as the
    /// hooks leave it, or None where none replaces it.
    fn run_backward_pre<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        grad_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        backward::run(&self.hooks, Phase::BackwardPre, module, grad_output, None)
    }

    /// Walks the `backward` phase of one call: the gradient of the module's input as the hooks
    /// leave it, or None where none replaces it.
    fn run_backward<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        grad_input: &Bound<'py, PyAny>,
        grad_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let also = Some(grad_output);
        backward::run(&self.hooks, Phase::Backward, module, grad_input, also)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hooks.visit(|hook| visit.call(hook.given()))
    }

    fn __clear__(&self) {
        self.hooks.clear(None);
    }
}

type Row = (u64, &'static str, Py<PyAny>, i64, bool, u64);

fn selected(phase: Option<PhaseName>) -> impl Iterator<Item = Phase> {
    Phase::ALL
        .into_iter()
        .filter(move |each| phase.as_ref().is_none_or(|wanted| wanted.0 == *each))
}
