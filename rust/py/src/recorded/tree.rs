//! `ModuleTree`: snapshot of a model's modules.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};

use crate::cpython::dict::instance_dict;
use crate::torch;

/// Snapshot of a model's modules, their children and their declarations. It keeps none of the
/// modules alive.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct ModuleTree(Vec<Node>);

struct Node {
    module: Py<PyWeakrefReference>,
    /// Addresses of its children; None for a module that is not descended into. They are unique
    /// while the children live, and the children are nodes too.
    children: Option<Box<[usize]>>,
    /// Its own declaration, if any.
    declared: Option<Py<PyDict>>,
}

/// Module as Python passes it.
#[derive(FromPyObject)]
struct Entry<'py> {
    module: Bound<'py, PyAny>,
    children: Option<Vec<Bound<'py, PyAny>>>,
    declared: Option<Bound<'py, PyDict>>,
}

#[pymethods]
impl ModuleTree {
    /// Takes each module once.
    #[new]
    fn new(modules: Vec<Entry<'_>>) -> PyResult<Self> {
        let nodes = modules.into_iter().map(Node::new);
        nodes.collect::<PyResult<_>>().map(Self)
    }
}

impl ModuleTree {
    /// True if all modules are alive and have the same children and declarations.
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
