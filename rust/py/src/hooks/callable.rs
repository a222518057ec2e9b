//! Refusal of callables that a call cannot run: async ones, and callables of other arguments.

use std::cmp::Ordering;
use std::fmt::Display;

use ferrohook_core::Phase;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyFunction, PyTuple, PyType};

use crate::cpython::once::Once;
use crate::error::hook_type_error;

/// `inspect.CO_VARARGS`.
const VARARGS: u32 = 0x04;
/// `inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR`.
const ASYNC: u32 = 0x80 | 0x200;

/// Arguments of a callable of PyTorch's contract.
pub fn plain_arguments(phase: Phase, with_kwargs: bool) -> &'static [&'static str] {
    match (phase, with_kwargs) {
        (Phase::ForwardPre, false) => &["module", "args"],
        (Phase::ForwardPre, true) => &["module", "args", "kwargs"],
        (Phase::Forward, false) => &["module", "args", "output"],
        (Phase::Forward, true) => &["module", "args", "kwargs", "output"],
        (Phase::BackwardPre, _) => &["module", "grad_output"],
        (Phase::Backward, _) => &["module", "grad_input", "grad_output"],
    }
}

/// Arguments of the callback of a typed hook.
pub fn typed_arguments(phase: Phase) -> &'static [&'static str] {
    match phase {
        Phase::ForwardPre => &["input"],
        Phase::Forward => &["input", "output"],
        Phase::BackwardPre => &["grad_output"],
        Phase::Backward => &["grad_input", "grad_output"],
    }
}

/// Raises for a callable whose body would never run, see `refuse_async`, or that cannot be called with
/// the arguments. `taker`: start of the message, such as "a forward hook".
pub fn check_call(
    callable: &Bound<'_, PyAny>,
    taker: impl Display,
    arguments: &[&str],
) -> PyResult<()> {
    static SIGNATURE: Once<Py<PyAny>> = Once::new();
    let function = Runs::of(callable)?;
    if let Some(function) = &function {
        function.refuse_async(callable, &taker)?;
        if function.takes(arguments.len())? {
            return Ok(());
        }
    }
    let py = callable.py();
    // Not the signature of a function inside, whose arguments a decorator may have changed.
    let inside = [("follow_wrapped", false)].into_py_dict(py)?;
    let signature = SIGNATURE.import(py, "inspect", "signature")?;
    let Ok(signature) = signature.call((callable,), Some(&inside)) else {
        return Ok(()); // unknown, as for a call in C
    };
    let bound = signature.call_method1("bind", PyTuple::new(py, arguments)?);
    bound.map(drop).map_err(|_| {
        let arguments = arguments.join(", ");
        let message =
            format!("{taker} is called as hook({arguments}), but this one takes {signature}");
        hook_type_error(py, message)
    })
}

/// Raises for a coroutine function and for an async generator function, also inside a method, a
/// `functools.partial` or `__call__`.
///
/// Args:
///     callable: any callable.
///     taker: start of the message, such as "a forward hook".
///
/// Raises:
///     HookTypeError: it is one of these.
#[pyfunction]
#[pyo3(signature = (callable, taker, /))]
pub fn refuse_async(callable: &Bound<'_, PyAny>, taker: &str) -> PyResult<()> {
    let function = Runs::of(callable)?;
    function.map_or(Ok(()), |it| it.refuse_async(callable, taker))
}

/// Function of Python that a callable runs.
struct Runs<'py> {
    code: Bound<'py, PyAny>,
    function: Bound<'py, PyFunction>,
    /// Number of positional arguments ahead of the call's; None if keywords are bound too.
    ahead: Option<usize>,
}

impl<'py> Runs<'py> {
    /// Looks through methods, `functools.partial` and `__call__`; None if no function is found.
    fn of(callable: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        static PARTIAL: Once<Py<PyType>> = Once::new();
        static METHOD: Once<Py<PyType>> = Once::new();
        let py = callable.py();
        let mut function = callable.clone();
        let mut ahead = Some(0);
        if !function.is_instance_of::<PyFunction>() {
            let partial = PARTIAL.import(py, "functools", "partial")?;
            while function.is_instance(partial)? {
                let keywords = function.getattr(intern!(py, "keywords"))?.is_truthy()?;
                let args = function.getattr(intern!(py, "args"))?.len()?;
                ahead = ahead.filter(|_| !keywords).map(|ahead| ahead + args);
                function = function.getattr(intern!(py, "func"))?;
            }
            if function.is_instance(METHOD.import(py, "types", "MethodType")?)? {
                function = function.getattr(intern!(py, "__func__"))?;
                ahead = ahead.map(|ahead| ahead + 1);
            }
            if !function.is_instance_of::<PyFunction>()
                && let Some(call) = function.get_type().getattr_opt(intern!(py, "__call__"))?
            {
                function = call;
                ahead = ahead.map(|ahead| ahead + 1);
            }
        }
        let Ok(function) = function.cast_into::<PyFunction>() else {
            return Ok(None);
        };
        let code = function.getattr(intern!(py, "__code__"))?;
        Ok(Some(Self {
            code,
            function,
            ahead,
        }))
    }

    fn flags(&self) -> PyResult<u32> {
        let flags = intern!(self.code.py(), "co_flags");
        self.code.getattr(flags)?.extract()
    }

    fn refuse_async(&self, callable: &Bound<'py, PyAny>, taker: impl Display) -> PyResult<()> {
        if self.flags()? & ASYNC == 0 {
            return Ok(());
        }
        let name = callable.getattr_opt(intern!(callable.py(), "__qualname__"))?;
        let name = name.map_or_else(|| callable.repr(), |name| name.str())?;
        Err(hook_type_error(
            callable.py(),
            format!(
                "{taker} must be a plain callable, got the async function {name}: a forward does \
                 not await hooks, so its body would never run"
            ),
        ))
    }

    /// True if it certainly takes a number of positional arguments.
    fn takes(&self, count: usize) -> PyResult<bool> {
        let py = self.code.py();
        let Some(ahead) = self.ahead else {
            return Ok(false);
        };
        let number = |name| self.code.getattr(name)?.extract::<usize>();
        if number(intern!(py, "co_kwonlyargcount"))? > 0 {
            return Ok(false);
        }
        let (given, most) = (ahead + count, number(intern!(py, "co_argcount"))?);
        match given.cmp(&most) {
            Ordering::Equal => Ok(true),
            Ordering::Greater => Ok(self.flags()? & VARARGS != 0),
            Ordering::Less => {
                let defaults = self.function.getattr(intern!(py, "__defaults__"))?;
                let defaults = defaults.cast::<PyTuple>().map_or(0, PyTupleMethods::len);
                Ok(given + defaults >= most)
            }
        }
    }
}
