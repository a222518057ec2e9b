//! `ModuleTree`: the modules of a model at one time.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};

use crate::cpython::dict::instance_dict;
use crate::torch;

/// The modules of a model with their children, and what they declare to record. Keeps none of them
/// alive.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct ModuleTree(Vec<Node>);

struct Node {
    module: Py<PyWeakrefReference>,
    /// Addresses of its children; None for a module that is not looked into. No other object has
    /// them while the children live, which are nodes too.
    children: Option<Box<[usize]>>,
    /// Its declaration, where it has one of its own.
    declared: Option<Py<PyDict>>,
}

/// A module as Python passes it.
#[derive(FromPyObject)]
struct Entry<'py> {
    module: Bound<'py, PyAny>,
    children: Option<Vec<Bound<'py, PyAny>>>,
    declared: Option<Bound<'py, PyDict>>,
}

#[pymethods]
impl ModuleTree {
    /// Each module once.
    #[new]
    fn new(modules: Vec<Entry<'_>>) -> PyResult<Self> {
        let nodes = modules.into_iter().map(Node::new);
        nodes.collect::<PyResult<_>>().map(Self)
    }
}

impl ModuleTree {
    /// True if all modules live, have the same children, and declare the same.
    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        for node in &self.0 {
            if !node.holds(py)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Node {
    fn new(entry: Entry<'_>) -> PyResult<Self> {
        let children = entry.children;
        Ok(Self {
            module: PyWeakrefReference::new(&entry.module)?.unbind(),
            children: children.map(|children| children.iter().map(address).collect()),
            declared: entry.declared.map(Bound::unbind),
        })
    }

    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(module) = self.module.bind(py).upgrade() else {
            return Ok(false);
        };
        if let Some(expected) = &self.children {
            let Some(children) = torch::children(&instance_dict(&module)?)? else {
                return Ok(false);
            };
            let addresses = children.iter().map(|(_, child)| address(&child));
            if children.len() != expected.len() || !addresses.eq(expected.iter().copied()) {
                return Ok(false);
            }
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

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr().addr()
}
