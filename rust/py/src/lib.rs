//! `ferrohook._core`: the registry, the handles and the call itself, for Python.
//!
//! This crate translates; what a hook is and when it fires is decided in `ferrohook-core`.

mod attachment;
mod backward;
mod batch;
mod call;
#[cfg(all(Py_3_12, not(Py_3_14)))]
mod depth;
mod detectors;
mod dict;
mod dispatcher;
mod error;
mod handle;
mod heap_type;
mod hook;
mod instrumenting;
mod invoke;
mod module;
mod point;
mod recorder;
mod recording;
mod registry;
mod scope;
mod torch;
mod tree;
mod typed;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::attachment::{Attachment, AttachmentContext};
    #[pymodule_export]
    use crate::batch::{record_all, register_all};
    #[pymodule_export]
    use crate::detectors::{
        CallCounter, LatencyDetector, NativeDetector, NonFiniteDetector, NormDetector,
        ShapeDetector,
    };
    #[pymodule_export]
    use crate::dispatcher::Dispatcher;
    #[pymodule_export]
    use crate::handle::HookHandle;
    #[pymodule_export]
    use crate::instrumenting::{assign_class, release_copy};
    #[pymodule_export]
    use crate::module::HookedBase;
    #[pymodule_export]
    use crate::point::PointHook;
    #[pymodule_export]
    use crate::recorder::{Collector, Recorder};
    #[pymodule_export]
    use crate::recording::{Call, InstallationBase, RecordedLayerBase, calls_in_progress};
    #[pymodule_export]
    use crate::registry::Registry;
    #[pymodule_export]
    use crate::scope::{ScopeBase, record};
    #[pymodule_export]
    use crate::torch::Callee;
    #[pymodule_export]
    use crate::tree::ModuleTree;
    #[pymodule_export]
    use crate::typed::TypedHook;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::heap_type::account_for_class(&module.py().get_type::<HookedBase>());
        // Made here: not in a call, where the stack may be as deep as it can be.
        module.add("Stop", module.py().get_type::<crate::recorder::Stop>())?;
        let scopes = crate::scope::variable(module.py())?;
        module.add("active_scopes", scopes)?;
        module.add(
            "installations",
            crate::recording::installations(module.py()),
        )?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
