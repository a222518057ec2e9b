//! `ferrohook._core`: the registry, the handles and the call itself, for Python.
//!
//! This crate translates; what a hook is and when it fires is decided in `ferrohook-core`.

mod attach;
mod call;
mod capture;
mod contexts;
mod cpython;
mod dict;
mod dispatcher;
mod error;
mod hold;
mod hooks;
mod native;
mod recorded;
mod registry;
mod torch;

// Paths of `dispatcher`, `hold` and `torch`.
#[cfg(all(Py_3_12, not(Py_3_14)))]
use cpython::depth;
use cpython::invoke;
use hooks::handle;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::attach::batch::{record_all, register_all};
    #[pymodule_export]
    use crate::attach::wrapper::HookedBase;
    #[pymodule_export]
    use crate::capture::recorder::{Collector, Recorder};
    #[pymodule_export]
    use crate::contexts::scope::{ScopeBase, record};
    #[pymodule_export]
    use crate::dispatcher::Dispatcher;
    #[pymodule_export]
    use crate::hold::{Hold, assign_class, release_copy};
    #[pymodule_export]
    use crate::hooks::handle::HookHandle;
    #[pymodule_export]
    use crate::native::detectors::{
        CallCounter, LatencyDetector, NativeDetector, NonFiniteDetector, NormDetector,
        ShapeDetector,
    };
    #[pymodule_export]
    use crate::native::point::PointHook;
    #[pymodule_export]
    use crate::native::typed::TypedHook;
    #[pymodule_export]
    use crate::recorded::tree::ModuleTree;
    #[pymodule_export]
    use crate::recorded::{Call, InstallationBase, RecordedLayerBase, calls_in_progress};
    #[pymodule_export]
    use crate::registry::Registry;
    #[pymodule_export]
    use crate::torch::Callee;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::cpython::heap_type::account_for_class(&module.py().get_type::<HookedBase>());
        // Made here: not in a call, where the stack may be as deep as it can be.
        module.add(
            "Stop",
            module.py().get_type::<crate::capture::recorder::Stop>(),
        )?;
        let scopes = crate::contexts::scope::variable(module.py())?;
        module.add("active_scopes", scopes)?;
        module.add("installations", crate::recorded::installations(module.py()))?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
