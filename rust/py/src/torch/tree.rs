//! `ModuleTree`: snapshot of the children of modules.

use pyo3::prelude::*;
use pyo3::types::{PyDictMethods, PyListMethods, PyWeakrefMethods, PyWeakrefReference};

use crate::cpython::dict::instance_dict;
use crate::torch;

/// Snapshot of the children of modules, by name. It keeps no module alive.
#[pyclass(frozen, weakref, module = "ferrohook._core")]
pub struct ModuleTree(Vec<Parent>);

struct Parent {
    module: Py<PyWeakrefReference>,
    children: Vec<Child>,
}

struct Child {
    name: Py<PyAny>,
    /// None for a name without a module.
    module: Option<Py<PyWeakrefReference>>,
}

#[pymethods]
impl ModuleTree {
    /// Takes the children of these modules.
    #[new]
    fn new(modules: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let parents = modules.iter().map(Parent::of);
        parents.collect::<PyResult<_>>().map(Self)
    }

    /// True if the modules have the children that they had.
    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        for parent in &self.0 {
            if !parent.unchanged(py)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Parent {
    fn of(module: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut children = Vec::new();
        for (name, child) in named_children(module)? {
            let reference = if child.is_none() {
                None
            } else {
                Some(PyWeakrefReference::new(&child)?.unbind())
            };
            children.push(Child {
                name: name.unbind(),
                module: reference,
            });
        }
        Ok(Self {
            module: PyWeakrefReference::new(module)?.unbind(),
            children,
        })
    }

    fn unchanged(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(module) = self.module.bind(py).upgrade() else {
            return Ok(false);
        };
        let now = named_children(&module)?;
        for (child, (name, module)) in self.children.iter().zip(&now) {
            let same = match &child.module {
                None => module.is_none(),
                Some(before) => before.bind(py).upgrade().is_some_and(|it| it.is(module)),
            };
            if !same || !(name.is(&child.name) || name.eq(&child.name)?) {
                return Ok(false);
            }
        }
        Ok(now.len() == self.children.len())
    }
}

type Named<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

fn named_children<'py>(module: &Bound<'py, PyAny>) -> PyResult<Vec<Named<'py>>> {
    // A copy: another thread may change the dict meanwhile.
    let children = torch::children(&instance_dict(module)?)?.map(|children| children.items());
    let items = children.iter().flat_map(PyListMethods::iter);
    items.map(|item| item.extract()).collect()
}
