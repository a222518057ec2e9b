//! Duties of objects of a heap type that pyo3 0.28 leaves out.
//!
//! Every object owns a reference to its class. The native base of a Python class has to visit and
//! release that reference; otherwise a class made for a module is never collected. (pyo3 0.30
//! releases it.)

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

#[derive(Clone, Copy)]
struct Slots {
    dealloc: ffi::destructor,
    traverse: ffi::traverseproc,
}

static SLOTS: OnceLock<Slots> = OnceLock::new();

/// Makes objects of `base`, and of classes derived from it later, visit and release their class.
pub fn account_for_class(base: &Bound<'_, PyType>) {
    let class = base.as_type_ptr();
    // SAFETY: a heap type of this module, not published yet.
    unsafe {
        let (Some(dealloc), Some(traverse)) = ((*class).tp_dealloc, (*class).tp_traverse) else {
            return;
        };
        if SLOTS.set(Slots { dealloc, traverse }).is_ok() {
            (*class).tp_dealloc = Some(dealloc_object);
            (*class).tp_traverse = Some(traverse_object);
        }
    }
}

unsafe extern "C" fn dealloc_object(object: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an object of ours; its class lives until the
    // reference is released here.
    unsafe {
        let class = ffi::Py_TYPE(object);
        if let Some(slots) = SLOTS.get() {
            (slots.dealloc)(object);
        }
        ffi::Py_DECREF(class.cast());
    }
}

unsafe extern "C" fn traverse_object(
    object: *mut ffi::PyObject,
    visit: ffi::visitproc,
    arg: *mut c_void,
) -> c_int {
    // SAFETY: the collector calls this attached, with an object of ours and a visitor.
    unsafe {
        match visit(ffi::Py_TYPE(object).cast(), arg) {
            0 => SLOTS
                .get()
                .map_or(0, |slots| (slots.traverse)(object, visit, arg)),
            stopped => stopped,
        }
    }
}
