//! Typed hooks: native wrappers of a Python callable.

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use crate::cpython::invoke;
use crate::error::{hook_type_error, type_name};
use crate::hooks::callable::{check_call, typed_arguments};
use crate::hooks::native::{Native, NativeHook, Outcome, Trace, Traced, Turn};
use crate::hooks::options::PhaseName;
use crate::torch;

/// Base of the typed hooks: a callback and the phase of its class.
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct TypedHook {
    phase: Phase,
    callback: Py<PyAny>,
}

#[pymethods]
impl TypedHook {
    #[new]
    #[pyo3(text_signature = "(phase, fn, /)")]
    fn new(py: Python<'_>, phase: PhaseName, r#fn: Py<PyAny>) -> PyResult<(Self, NativeHook)> {
        let callback = r#fn.bind(py);
        if !callback.is_callable() {
            return Err(hook_type_error(
                py,
                format!(
                    "a typed {} hook must wrap a callable, got {}",
                    phase.0,
                    type_name(callback)
                ),
            ));
        }
        let taker = format_args!("the function of a typed {} hook", phase.0);
        check_call(callback, taker, typed_arguments(phase.0))?;
        let hook = Self {
            phase: phase.0,
            callback: r#fn,
        };
        Ok((hook, NativeHook::of::<Self>()))
    }

    /// The callback.
    #[getter]
    fn r#fn<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.callback.bind(py)
    }

    /// Phase that hooks of this class are registered for.
    #[getter]
    fn phase(&self) -> &'static str {
        self.phase.name()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let callback = slf.get().callback.bind(slf.py()).repr()?;
        Ok(format!("{}({callback})", type_name(slf)))
    }

    /// Copies and pickles as its class called with the callback.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyAny>,)) {
        let callback = slf.get().callback.bind(slf.py()).clone();
        (slf.get_type(), (callback,))
    }

    // No `__clear__`: the hook is immutable, so a cycle through it has another edge to cut (a
    // function's closure, an object's attributes).
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.callback)
    }
}

impl Native for TypedHook {
    fn phase(&self) -> Option<Phase> {
        Some(self.phase)
    }

    fn changes(&self) -> bool {
        self.phase == Phase::ForwardPre
    }

    fn runs_python(&self) -> bool {
        true
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let callback = self.callback.bind(object.py());
        let input = turn.input();
        let result = match (turn.phase, turn.grad_output) {
            (Phase::ForwardPre, _) => {
                let result = invoke::call(callback, [&input])?;
                return input_of(turn, result).map(Some);
            }
            (Phase::Forward, _) => invoke::call(callback, [&input, turn.value])?,
            (_, Some(grad_output)) => invoke::call(callback, [turn.value, grad_output])?,
            (_, None) => invoke::call(callback, [turn.value])?,
        };
        if result.is_none() {
            return Ok(None);
        }
        Err(turn.type_error("it only observes and must return None", &result))
    }

    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        self.callback.bind(object.py()).clone()
    }

    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced {
            kind: "typed",
            ..Traced::plain(self.named(object), false)
        }))
    }
}

/// Converts the result of a `ForwardPreHook` into arguments, if it has the call's arity.
fn input_of<'py>(turn: &Turn<'_, 'py>, result: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let arity = turn.args.len();
    if let Ok(args) = result.cast::<PyTuple>() {
        if args.len() == arity {
            return Ok(result);
        }
    } else if arity == 1 && torch::is_tensor(&result)? {
        return Ok(PyTuple::new(result.py(), [&result])?.into_any());
    }
    let expected = if arity == 1 {
        "it must return a tensor or a tuple with one item".to_owned()
    } else {
        format!("it must return a tuple of {arity} items, one for each argument of the call")
    };
    Err(turn.type_error(&expected, &result))
}
