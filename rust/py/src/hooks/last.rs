//! `LastHook`: a hook of the package itself, which runs after all others of a module.

use ferrohook_core::Phase;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::cpython::invoke;
use crate::hooks::native::{Native, NativeHook, Outcome, Trace, Traced, Turn};

/// Base of the package's own hooks: they run after all hooks of users.
///
/// In the phase `forward` the hook is called, in `forward_pre` its method `begin`. `torch.compile`
/// traces the former and leaves out the latter.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct LastHook;

#[pymethods]
impl LastHook {
    #[new]
    #[pyo3(signature = (*_others))]
    fn new(_others: &Bound<'_, PyTuple>) -> (Self, NativeHook) {
        (Self, NativeHook::of::<Self>())
    }
}

impl Native for LastHook {
    fn last(&self) -> bool {
        true
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let py = object.py();
        let kwargs = turn
            .kwargs
            .map_or_else(|| PyDict::new(py), Bound::clone)
            .into_any();
        let (module, args) = (turn.module, turn.args.as_any());
        if turn.phase == Phase::Forward {
            invoke::call(object, [module, args, &kwargs, turn.value])?;
        } else {
            let begin = object.getattr(intern!(py, "begin"))?;
            invoke::call(&begin, [module, args, &kwargs])?;
        }
        Ok(None)
    }

    fn traced<'py>(&self, object: &Bound<'py, PyAny>, phase: Phase) -> Trace<'py> {
        let traced = || Traced::plain(object.clone(), true);
        Ok((phase == Phase::Forward).then(traced))
    }
}
