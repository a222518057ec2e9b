//! The registry of a module, wrapper or instrumented.

use pyo3::intern;
use pyo3::prelude::*;

use crate::attach::dispatcher::Dispatcher;
use crate::attach::wrapper::HookedBase;
use crate::cpython::dict::instance_dict;
use crate::error::{hook_error, type_name};
use crate::registry::Registry;

/// The registry of a module; an error where that is not instrumented.
pub fn registry_of<'py>(module: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Registry>> {
    let py = module.py();
    if let Ok(wrapper) = module.cast::<HookedBase>() {
        return wrapper.get().registry(py).cloned();
    }
    let found = instance_dict(module)?.get_item(intern!(py, Dispatcher::KEY))?;
    let dispatcher = found.ok_or_else(|| {
        hook_error(
            py,
            format!(
                "this {} is no longer instrumented: its hooks were removed",
                type_name(module)
            ),
        )
    })?;
    let dispatcher = dispatcher.cast_into::<Dispatcher>()?;
    Ok(dispatcher.get().registry(py).clone())
}
