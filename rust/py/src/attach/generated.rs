//! Generated classes of the process, one for each pair of bases.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyType, PyWeakrefMethods, PyWeakrefReference};

use crate::cpython::invoke;

/// Weak references by the addresses of the two bases, which the class keeps alive.
type Classes = BTreeMap<(usize, usize), Py<PyWeakrefReference>>;

/// Returns the generated class of two bases that is alive; `made`, which is remembered, if there is
/// none.
#[pyfunction]
#[pyo3(signature = (base, plain, made = None))]
pub fn generated_class<'py>(
    base: &Bound<'py, PyType>,
    plain: &Bound<'py, PyType>,
    made: Option<Bound<'py, PyType>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    static CLASSES: Mutex<Classes> = Mutex::new(Classes::new());
    let py = base.py();
    let key = (base.as_ptr() as usize, plain.as_ptr() as usize);
    let reference = made.as_deref().map(PyWeakrefReference::new).transpose()?;
    let mut living = Vec::new();
    let mut classes = loop {
        if let Some(classes) = CLASSES.try_lock() {
            break classes;
        }
        // Locked only with the interpreter attached: by no thread across a fork.
        invoke::detached(py, || drop(CLASSES.lock()));
    };
    // Runs no Python code under the lock: allocates nothing, and drops classes after it.
    let alive = |reference: &Py<PyWeakrefReference>| reference.bind(py).upgrade();
    if let Some(found) = classes.get(&key).and_then(alive) {
        return Ok(Some(found));
    }
    if let Some(reference) = reference {
        classes.retain(|_, reference| {
            let before = living.len();
            living.extend(alive(reference));
            living.len() > before
        });
        classes.insert(key, reference.unbind());
    }
    drop(classes);
    Ok(made.map(Bound::into_any))
}
