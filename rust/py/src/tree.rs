//! The modules of a model as they were at one moment.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyWeakrefMethods, PyWeakrefReference};

use crate::torch;

/// The modules of a model with the children that they had, and what they declared to record.
///
/// Keeps none of them alive. Whether it holds is asked at every call that records.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct ModuleTree {
    modules: Vec<Module>,
    /// Where the objects stood that are looked at. Hints alone: memory is slow, and to ask for it
    /// all at once takes a fraction of the time.
    places: Vec<usize>,
}

struct Module {
    reference: Py<PyWeakrefReference>,
    /// None of what is not looked into. Addresses, to be compared alone: each child is a module of
    /// the tree itself, and no other object has its address while it lives.
    children: Option<Vec<usize>>,
    /// None where it declares nothing, if only that it is nothing.
    declared: Option<Py<PyDict>>,
}

type Given<'py> = (
    Bound<'py, PyAny>,
    Option<Bound<'py, PyList>>,
    Option<Bound<'py, PyDict>>,
);

#[pymethods]
impl ModuleTree {
    #[new]
    fn new(modules: Vec<Given<'_>>) -> PyResult<Self> {
        let mut tree = Self {
            modules: Vec::with_capacity(modules.len()),
            places: Vec::with_capacity(4 * modules.len()),
        };
        for (module, children, declared) in modules {
            let reference = PyWeakrefReference::new(&module)?;
            let state = torch::instance_dict(&module)?;
            let own = state.get_item(intern!(module.py(), "_modules"))?;
            tree.places
                .extend([&module, &reference, &state].map(|each| address(each)));
            tree.places.extend(own.as_ref().map(address));
            tree.modules.push(Module {
                reference: reference.unbind(),
                children: children
                    .map(|children| children.iter().map(|each| address(&each)).collect()),
                declared: declared.map(Bound::unbind),
            });
        }
        Ok(tree)
    }

    /// Whether all modules still have the same children, and declare the same.
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        self.places.iter().copied().for_each(prefetch);
        for module in &self.modules {
            if !module.holds(py)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Module {
    fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(module) = self.reference.bind(py).upgrade() else {
            return Ok(false);
        };
        if let Some(children) = &self.children
            && !has(&module, children)?
        {
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

fn has(module: &Bound<'_, PyAny>, children: &[usize]) -> PyResult<bool> {
    let state = torch::instance_dict(module)?;
    let now = state.get_item(intern!(module.py(), "_modules"))?;
    let Some(now) = now.and_then(|now| now.cast_into::<PyDict>().ok()) else {
        return Ok(false);
    };
    if now.len() != children.len() {
        return Ok(false);
    }
    // Most modules have none.
    Ok(children.is_empty() || {
        let now = now.values();
        now.iter()
            .map(|child| address(&child))
            .eq(children.iter().copied())
    })
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
