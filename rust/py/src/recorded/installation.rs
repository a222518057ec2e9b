//! `InstallationBase`: the recorders attached to one model.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::attach::attachment::Attachment;
use crate::cpython::dict::instance_dict;
use crate::torch;

/// Bits of an installation's state: retired; the hooks are in a graph; a recording call in flight.
const RETIRED: usize = 1;
const TRACED: usize = 2;
const CALL: usize = 4;

/// Native half of an `Installation`: the recorders attached to one model, and a snapshot of its
/// modules.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
pub struct InstallationBase {
    modules: Vec<Module>,
    attachment: Py<Attachment>,
    /// `RETIRED`, `TRACED`, and `CALL` for each recording call in flight. At 0 the layers return at
    /// once.
    state: AtomicUsize,
}

/// Module of the snapshot, its children and its declaration. It is not kept alive.
struct Module {
    reference: Py<PyWeakrefReference>,
    /// Addresses of its children, unique while these live: they are in the snapshot too.
    children: Vec<usize>,
    /// Its own declaration, if any.
    declared: Option<Py<PyDict>>,
}

#[pymethods]
impl InstallationBase {
    /// Takes the model's modules, each with a copy of its declaration, if it has one.
    #[new]
    #[pyo3(signature = (modules, *_others))]
    fn new(
        py: Python<'_>,
        modules: Vec<(Bound<'_, PyAny>, Option<Py<PyDict>>)>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<Self> {
        let modules = modules.into_iter();
        let modules = modules.map(|(module, declared)| Module::new(&module, declared));
        Ok(Self {
            modules: modules.collect::<PyResult<_>>()?,
            attachment: Py::new(py, Attachment::default())?,
            state: AtomicUsize::new(0),
        })
    }

    /// The modules and hooks of the layers.
    #[getter]
    fn attachment<'py>(&self, py: Python<'py>) -> &Bound<'py, Attachment> {
        self.attachment.bind(py)
    }

    /// True if all modules are alive and have the same children and declarations.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        for module in &self.modules {
            if !module.holds(py)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Has the layers watched for good: a graph holds their hooks.
    fn watch(&self) {
        self.state.fetch_or(TRACED, Ordering::AcqRel);
    }

    /// Releases the model once no call records any more.
    fn retire(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.fetch_or(RETIRED, Ordering::AcqRel) | RETIRED;
        self.release_if_idle(py, state)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.attachment)
    }
}

impl InstallationBase {
    /// True if the layers are watched: one atomic read.
    pub fn watched(&self) -> bool {
        // Relaxed: the layers of a call run in its own thread, or in threads that it synchronised
        // with.
        self.state.load(Ordering::Relaxed) > RETIRED
    }

    /// Begins a recording call. False if it is retired.
    pub fn begin(&self) -> bool {
        let add_call = |state| (state & RETIRED == 0).then_some(state + CALL);
        let begun = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, add_call);
        begun.is_ok()
    }

    /// Ends a recording call.
    pub fn end(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.fetch_sub(CALL, Ordering::AcqRel) - CALL;
        self.release_if_idle(py, state)
    }

    fn release_if_idle(&self, py: Python<'_>, state: usize) -> PyResult<()> {
        if state & RETIRED != 0 && state < CALL {
            self.attachment.get().release(py)?;
        }
        Ok(())
    }
}

impl Module {
    fn new(module: &Bound<'_, PyAny>, declared: Option<Py<PyDict>>) -> PyResult<Self> {
        Ok(Self {
            reference: PyWeakrefReference::new(module)?.unbind(),
            children: children(module)?.iter().flat_map(addresses).collect(),
            declared,
        })
    }

    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(module) = self.reference.bind(py).upgrade() else {
            return Ok(false);
        };
        let children = children(&module)?;
        let children = children.iter().flat_map(addresses);
        if !children.eq(self.children.iter().copied()) {
            return Ok(false);
        }
        let Some(declared) = &self.declared else {
            return Ok(true);
        };
        match module.getattr_opt(intern!(py, "_can_record_outputs"))? {
            Some(now) if now.is_truthy()? => now.eq(declared),
            _ => Ok(declared.bind(py).is_empty()),
        }
    }
}

fn children<'py>(module: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    torch::children(&instance_dict(module)?)
}

fn addresses(children: &Bound<'_, PyDict>) -> impl Iterator<Item = usize> {
    children.iter().map(|(_, child)| child.as_ptr().addr())
}
