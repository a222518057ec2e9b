//! The modules of a model as they were at one moment.

use std::iter::Peekable;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};

use crate::torch;

/// The modules of a model with the children that they had, and what they declared to record.
///
/// Keeps none of them alive. Whether it holds is asked at every call that records, so it touches
/// little: memory is slow, and a model's modules are many.
#[pyclass(frozen, module = "ferrohook._core")]
pub struct ModuleTree {
    /// From the root on, each module's number of children and, for each child, its address; that
    /// of one which is looked into is marked, and followed by the like of its own. Addresses are to
    /// be compared alone: while all the modules live, no other object has theirs.
    shape: Vec<usize>,
    /// Whether one of the modules is gone.
    gone: Arc<AtomicBool>,
    /// By these it is told.
    references: Vec<Py<PyWeakrefReference>>,
    /// What some of them declared.
    declared: Vec<(Py<PyWeakrefReference>, Py<PyDict>)>,
    /// Where the objects stood that are looked at. Hints alone: to ask for all memory at once takes
    /// a fraction of the time.
    places: Vec<usize>,
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
    /// Each module once, in the order of a walk from the root.
    #[new]
    fn new(py: Python<'_>, modules: Vec<Given<'_>>) -> PyResult<Self> {
        let gone = Arc::new(AtomicBool::new(false));
        let told = Bound::new(py, Gone(Arc::clone(&gone)))?;
        let mut tree = Self {
            shape: Vec::new(),
            gone,
            references: Vec::with_capacity(modules.len()),
            declared: Vec::new(),
            places: Vec::with_capacity(3 * modules.len()),
        };
        for (module, _, declared) in &modules {
            let state = torch::instance_dict(module)?;
            let children = torch::children(&state)?;
            tree.places
                .extend([module, &state].map(|each| address(each)));
            tree.places.extend(children.as_deref().map(address));
            let reference = PyWeakrefReference::new_with(module, &told)?;
            tree.references.push(reference.unbind());
            if let Some(declared) = declared {
                let reference = PyWeakrefReference::new(module)?.unbind();
                tree.declared.push((reference, declared.clone().unbind()));
            }
        }
        tree.add(&mut modules.iter().peekable());
        Ok(tree)
    }

    /// Whether all modules still have the same children, and declare the same.
    ///
    /// Args:
    ///     root: of the modules.
    fn holds(&self, root: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.places.iter().copied().for_each(prefetch);
        // Acquire pairs with the release of who tells.
        if self.gone.load(Ordering::Acquire) || !same(root, &mut self.shape.iter())? {
            return Ok(false);
        }
        for (reference, declared) in &self.declared {
            if !declares(root.py(), reference, declared)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl ModuleTree {
    /// The shape from the next module on, as deep as the walk went there.
    fn add(&mut self, modules: &mut Peekable<slice::Iter<'_, Given<'_>>>) {
        let Some((_, children, _)) = modules.next() else {
            return;
        };
        let Some(children) = children else {
            self.shape.push(NOT_LOOKED_INTO);
            return;
        };
        self.shape.push(children.len());
        for child in children {
            let follows = modules.peek().is_some_and(|(next, ..)| next.is(child));
            self.shape.push(address(child) | usize::from(follows));
            if follows {
                self.add(modules);
            }
        }
    }
}

const NOT_LOOKED_INTO: usize = usize::MAX;
/// Of the address of a child whose own children follow. Objects stand at even addresses.
const FOLLOWS: usize = 1;

/// Whether a module has the shape that comes next.
fn same(module: &Bound<'_, PyAny>, shape: &mut slice::Iter<'_, usize>) -> PyResult<bool> {
    let Some(&count) = shape.next() else {
        return Ok(false);
    };
    if count == NOT_LOOKED_INTO {
        return Ok(true);
    }
    let children = torch::children(&torch::instance_dict(module)?)?;
    let Some(children) = children.filter(|children| children.len() == count) else {
        return Ok(false);
    };
    if count == 0 {
        return Ok(true); // as most have none
    }
    for (_, child) in &children {
        let Some(&expected) = shape.next() else {
            return Ok(false);
        };
        let follows = expected & FOLLOWS != 0;
        if address(&child) != expected & !FOLLOWS || follows && !same(&child, shape)? {
            return Ok(false);
        }
    }
    Ok(true)
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
