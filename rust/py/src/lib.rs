//! `ferrohook._core`: registry, handles and the call itself, for Python.
//!
//! This crate is the binding: `ferrohook-core` defines hooks, their order and when they fire.

mod attach;
mod call;
mod capture;
mod checksum;
mod contexts;
mod cpython;
mod effects;
mod error;
mod gates;
mod hooks;
mod registry;
mod rows;
#[cfg(test)]
mod tests;
mod torch;

use pyo3::prelude::*;
use pyo3::types::PyMapping;

#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyMapping, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::attach::attachment::{Attachment, AttachmentContext};
    #[pymodule_export]
    use crate::attach::dispatcher::Dispatcher;
    #[pymodule_export]
    use crate::attach::generated::generated_class;
    #[pymodule_export]
    use crate::attach::instrumenting::{
        assign_class, put_on, release_copy, release_unused, take_off,
    };
    #[pymodule_export]
    use crate::attach::sites::{SitesBase, run_forward_hooks};
    #[pymodule_export]
    use crate::attach::wrapper::{HookedBase, keeps_state_in_torch_hooks};
    #[pymodule_export]
    use crate::capture::collector::Collector;
    #[pymodule_export]
    use crate::capture::reading::{CacheBase, CapturedBase};
    #[pymodule_export]
    use crate::capture::recorder::{Recorder, record, record_all, store_rows};
    #[pymodule_export]
    use crate::capture::request::RequestBase;
    #[pymodule_export]
    use crate::capture::root_calls::RootCalls;
    #[pymodule_export]
    use crate::checksum::crc32;
    #[pymodule_export]
    use crate::contexts::activation::Activation;
    #[pymodule_export]
    use crate::contexts::frame::Frame;
    #[pymodule_export]
    use crate::contexts::regions::{ForwardLog, RegionRun, Repeat, open_regions};
    #[pymodule_export]
    use crate::effects::detectors::{
        CallCounter, LatencyDetector, NativeDetector, NonFiniteDetector, NormDetector,
        ShapeDetector,
    };
    #[pymodule_export]
    use crate::effects::gate::GateHook;
    #[pymodule_export]
    use crate::effects::gpu_vector::GpuVector;
    #[pymodule_export]
    use crate::effects::intervention::InterventionBase;
    #[pymodule_export]
    use crate::effects::masked::MaskedHook;
    #[pymodule_export]
    use crate::effects::planned::{EndOfCall, PlanGuard};
    #[pymodule_export]
    use crate::effects::tokens::TokenHook;
    #[pymodule_export]
    use crate::effects::typed::TypedHook;
    #[pymodule_export]
    use crate::gates::aggregation::GateAggregation;
    #[pymodule_export]
    use crate::gates::conditions::{StopCheck, TokenChoice};
    #[pymodule_export]
    use crate::gates::state::GateReadings;
    #[pymodule_export]
    use crate::gates::writer::{GateWriter, store_readings};
    #[pymodule_export]
    use crate::hooks::callable::refuse_async;
    #[pymodule_export]
    use crate::hooks::handle::HookHandle;
    #[pymodule_export]
    use crate::hooks::last::LastHook;
    #[pymodule_export]
    use crate::hooks::native::NativeHook;
    #[pymodule_export]
    use crate::registry::Registry;
    #[pymodule_export]
    use crate::rows::at::{name_positions, needs_prompt, places_at};
    #[pymodule_export]
    use crate::rows::batch::BatchBase;
    #[pymodule_export]
    use crate::rows::call_tokens::CallTokens;
    #[pymodule_export]
    use crate::rows::calls::program_cache::cache_programs;
    #[pymodule_export]
    use crate::rows::tracker::TokenTracker;
    #[pymodule_export]
    use crate::torch::cache::CallCache;
    #[pymodule_export]
    use crate::torch::copies::to_device;
    #[pymodule_export]
    use crate::torch::tree::ModuleTree;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::cpython::heap_type::account_for_class(&module.py().get_type::<HookedBase>());
        let py = module.py();
        // Created here: in a call the stack may be exhausted, and a finaliser that runs while pyo3
        // creates a class would wait for it.
        module.add("Stop", py.get_type::<crate::call::stop::Stop>())?;
        let _classes = [
            py.get_type::<crate::call::backward::BackwardWalk>(),
            py.get_type::<crate::capture::keeping::GradientSlot>(),
            py.get_type::<crate::contexts::regions::Regions>(),
            py.get_type::<PyMapping>(),
        ];
        let frames = crate::contexts::current::variable(py)?;
        module.add("frames", frames)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
