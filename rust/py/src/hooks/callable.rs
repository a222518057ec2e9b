//! Refusal of callables whose call runs nothing.

use std::fmt::Display;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyFunction, PyType};

use crate::error::hook_type_error;

/// `inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR`.
const ASYNC: u32 = 0x80 | 0x200;

/// Raises for a coroutine function and for an async generator function, also inside a method, a
/// `functools.partial` or `__call__`. `taker`: start of the message, such as "a forward hook".
pub fn refuse_async(callable: &Bound<'_, PyAny>, taker: impl Display) -> PyResult<()> {
    if !is_async(callable)? {
        return Ok(());
    }
    let name = callable.getattr_opt(intern!(callable.py(), "__qualname__"))?;
    let name = name.map_or_else(|| callable.repr(), |name| name.str())?;
    Err(hook_type_error(
        callable.py(),
        format!(
            "{taker} is a plain callable, got the async function {name}: a forward awaits nothing, \
             so its body would never run"
        ),
    ))
}

fn is_async(callable: &Bound<'_, PyAny>) -> PyResult<bool> {
    static PARTIAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static METHOD: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = callable.py();
    if callable.is_instance_of::<PyFunction>() {
        return runs_later(callable);
    }
    let mut function = callable.clone();
    let partial = PARTIAL.import(py, "functools", "partial")?;
    while function.is_instance(partial)? {
        function = function.getattr(intern!(py, "func"))?;
    }
    if function.is_instance(METHOD.import(py, "types", "MethodType")?)? {
        function = function.getattr(intern!(py, "__func__"))?;
    }
    if !function.is_instance_of::<PyFunction>()
        && let Some(call) = function.get_type().getattr_opt(intern!(py, "__call__"))?
    {
        function = call;
    }
    Ok(function.is_instance_of::<PyFunction>() && runs_later(&function)?)
}

fn runs_later(function: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = function.py();
    let code = function.getattr(intern!(py, "__code__"))?;
    let flags: u32 = code.getattr(intern!(py, "co_flags"))?.extract()?;
    Ok(flags & ASYNC != 0)
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
#[pyo3(name = "refuse_async", signature = (callable, taker, /))]
pub fn py_refuse_async(callable: &Bound<'_, PyAny>, taker: &str) -> PyResult<()> {
    refuse_async(callable, taker)
}
