//! `ferrohook._core`: the registry, the handles and the call itself, for Python.
//!
//! This crate translates; what a hook is and when it fires is decided in `ferrohook-core`.

mod backward;
mod call;
#[cfg(all(Py_3_12, not(Py_3_14)))]
mod depth;
mod error;
mod handle;
mod heap_type;
mod hook;
mod invoke;
mod module;
mod registry;
mod torch;
mod typed;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::handle::HookHandle;
    #[pymodule_export]
    use crate::module::HookedBase;
    #[pymodule_export]
    use crate::registry::Registry;
    #[pymodule_export]
    use crate::typed::TypedHook;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::heap_type::account_for_class(&module.py().get_type::<HookedBase>());
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
