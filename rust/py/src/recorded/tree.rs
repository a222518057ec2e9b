//! The modules of a model as they were at one moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};

use crate::dict::{Known, Moment, instance_dict};
use crate::torch;

/// The modules of a model with the children that they had, and what they declared to record.
///
/// Keeps none of them alive. Whether it holds is asked at every call that records, so it touches
/// little: memory is slow, and a model's modules are many.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct ModuleTree {
    nodes: Vec<Node>,
    /// Whether one of the modules is gone.
    gone: Arc<AtomicBool>,
    /// What some of them declared.
    declared: Vec<(Py<PyWeakrefReference>, Py<PyDict>)>,
}

/// A module with its children and, where it declares, what; None in place of the children of one
/// that is not looked into.
type Given<'py> = (
    Bound<'py, PyAny>,
    Option<Vec<Bound<'py, PyAny>>>,
    Option<Bound<'py, PyDict>>,
);

#[pymethods]
impl ModuleTree {
    /// Each module once.
    #[new]
    fn new(py: Python<'_>, modules: Vec<Given<'_>>) -> PyResult<Self> {
        let gone = Arc::new(AtomicBool::new(false));
        let told = Bound::new(py, Gone(Arc::clone(&gone)))?;
        let mut tree = Self {
            nodes: Vec::with_capacity(modules.len()),
            gone,
            declared: Vec::new(),
        };
        for (module, children, declared) in modules {
            let reference = PyWeakrefReference::new_with(&module, &told)?.unbind();
            if let Some(declared) = declared {
                let known = (reference.clone_ref(py), declared.unbind());
                tree.declared.push(known);
            }
            tree.nodes.push(Node {
                reference,
                module: module.as_ptr().expose_provenance(),
                children: children.map(|children| children.iter().map(address).collect()),
                state: Known::default(),
                dict: Known::default(),
            });
        }
        Ok(tree)
    }
}

impl ModuleTree {
    /// Whether all modules still have the same children, and declare the same.
    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        self.nodes.iter().for_each(Node::prefetch);
        // Acquire pairs with the release of who tells.
        if self.gone.load(Ordering::Acquire) {
            return Ok(false);
        }
        for node in &self.nodes {
            if !node.holds(py)? {
                return Ok(false);
            }
        }
        for (reference, declared) in &self.declared {
            if !declares(py, reference, declared)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// One of the modules, with the children that it had.
struct Node {
    /// By this it is told that the module is gone.
    #[cfg_attr(not(Py_GIL_DISABLED), expect(dead_code, reason = "kept alive"))]
    reference: Py<PyWeakrefReference>,
    /// Where it stands, for as long as it is not gone.
    module: usize,
    /// Where its children stood; None where it is not looked into. To be compared alone: while all
    /// the modules live, no other object has their addresses.
    children: Option<Box<[usize]>>,
    /// Its `__dict__`, and the dict of its children therein, when they were last found to be so.
    state: Known,
    dict: Known,
}

impl Node {
    /// To ask for all memory at once takes a fraction of the time.
    fn prefetch(&self) {
        prefetch(self.module);
        prefetch(self.state.place().addr());
        prefetch(self.dict.place().addr());
    }

    /// Whether the module, which is not gone, has the same children.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(expected) = &self.children else {
            return Ok(true);
        };
        let Some(module) = self.module(py) else {
            return Ok(false);
        };
        let state = instance_dict(&module)?;
        // SAFETY: a state that did not change holds the dict.
        if self.state.is(&state) && unsafe { self.dict.unchanged() } {
            return Ok(true);
        }
        let moment = Moment::of(&state);
        let Some(children) = torch::children(&state)? else {
            return Ok(false);
        };
        let moments = (moment, Moment::of(&children));
        let each = children.iter().map(|(_, child)| address(&child));
        let same = children.len() == expected.len() && each.eq(expected.iter().copied());
        if same {
            self.state.set(&moments.0);
            self.dict.set(&moments.1);
        }
        Ok(same)
    }

    #[cfg_attr(
        not(Py_GIL_DISABLED),
        expect(clippy::unnecessary_wraps, reason = "it may go without the GIL")
    )]
    fn module<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        #[cfg(Py_GIL_DISABLED)]
        return self.reference.bind(py).upgrade();
        #[cfg(not(Py_GIL_DISABLED))]
        {
            let module = std::ptr::with_exposed_provenance_mut(self.module);
            // SAFETY: it is not gone, and as the GIL is held it stays.
            Some(unsafe { Borrowed::from_ptr(py, module) }.to_owned())
        }
    }
}

/// Whether a module declares that, if only that it is nothing.
fn declares(
    py: Python<'_>,
    module: &Py<PyWeakrefReference>,
    declared: &Py<PyDict>,
) -> PyResult<bool> {
    let Some(module) = module.bind(py).upgrade() else {
        return Ok(false);
    };
    match module.getattr_opt(intern!(py, "_can_record_outputs"))? {
        Some(now) if now.is_truthy()? => now.eq(declared),
        _ => Ok(declared.bind(py).is_empty()),
    }
}

/// What is called when one of the modules goes.
#[pyclass(frozen)]
struct Gone(Arc<AtomicBool>);

#[pymethods]
impl Gone {
    fn __call__(&self, _module: &Bound<'_, PyAny>) {
        self.0.store(true, Ordering::Release);
    }
}

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr().addr()
}

/// Has the processor fetch what stands at an address, if anything does.
#[inline]
fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
