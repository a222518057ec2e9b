//! What this crate knows of torch. Imported at first use: the extension itself needs no torch.
//!
//! Nothing that can change is relied on from one call to the next. What another library did to the
//! module's hook dicts, to torch's global ones, to `forward` on the instance or the class, or to
//! `nn.Module.__call__` is seen by the next call.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyFunction, PyString, PyTuple};
use pyo3::{ffi, types::PyType};

use crate::invoke;

struct Torch {
    /// `nn.Module.__call__` as torch defines it, and what that calls.
    module_call: Py<PyAny>,
    module_call_impl: Py<PyAny>,
    /// `object.__getattribute__`.
    plain_getattribute: Py<PyAny>,
    /// The dicts of hooks for all modules, which torch changes in place.
    global_hooks: [Py<PyDict>; 4],
    /// The hooks of one module, in its instance dict.
    module_hooks: [Variable; 4],
    /// What `nn.Module.compile` sets in the instance dict.
    compiled_call: Variable,
    /// What somebody may have put into the instance dict in place of the class's.
    own_call_impl: Variable,
    /// A `forward` that somebody put into the instance dict.
    own_forward: Variable,
    /// The variables of `torch.jit._trace`, and the one that is set while it traces.
    trace_globals: Py<PyDict>,
    trace_map: Variable,
    tensor: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    backward_pass: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let module = py.import("torch.nn.modules.module")?;
            let torch = py.import("torch")?;
            let global = |name| -> PyResult<_> { Ok(module.getattr(name)?.cast_into()?.unbind()) };
            let example = instance_dict(&module.getattr("Module")?.call0()?)?;
            let trace_globals = py.import("torch.jit._trace")?.dict();
            Ok(Self {
                module_call: module.getattr("Module")?.getattr("__call__")?.unbind(),
                module_call_impl: module.getattr("Module")?.getattr("_call_impl")?.unbind(),
                plain_getattribute: py.get_type::<PyAny>().getattr("__getattribute__")?.unbind(),
                global_hooks: [
                    global("_global_forward_hooks")?,
                    global("_global_forward_pre_hooks")?,
                    global("_global_backward_hooks")?,
                    global("_global_backward_pre_hooks")?,
                ],
                module_hooks: [
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                    "_backward_pre_hooks",
                ]
                .map(|name| Variable::like_in(&example, name)),
                compiled_call: Variable::like_in(&example, "_compiled_call_impl"),
                own_call_impl: Variable::like_in(&example, "_call_impl"),
                own_forward: Variable::like_in(&example, "forward"),
                trace_map: Variable::like_in(&trace_globals, "_trace_module_map"),
                trace_globals: trace_globals.unbind(),
                tensor: torch.getattr("Tensor")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                backward_pass: py
                    .import("ferrohook.backward")?
                    .getattr("BackwardPass")?
                    .unbind(),
            })
        })
    }
}

/// How the instances of one class are called, for as long as the class stays as it is.
///
/// CPython gives a class (its bases included) a new version number when it changes, and never the
/// same number twice: an equal number means that looking up again would find the same.
#[derive(Default)]
pub struct Callee(OnceLock<PlainClass>);

/// A class whose `__call__` is `nn.Module`'s and whose `forward` is a plain function.
struct PlainClass {
    version: u32,
    forward: Py<PyFunction>,
}

impl Callee {
    /// Calls `module` as `module(*args, **kwargs)` does.
    ///
    /// Where that would come down to `module.forward`, goes there without the detour: nothing
    /// overrides `__call__`, no hook of torch's is registered on the module or globally, the
    /// module is not compiled in place and nothing is being traced.
    pub fn call<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = module.py();
        let torch = Torch::get(py)?;
        let class = module.get_type();
        let forward = self.forward(torch, &class)?;
        if forward.is_none() && !calls_forward(torch, &class)? {
            return invoke::call_with(module, args, kwargs);
        }
        let state = instance_dict(module)?;
        if !nothing_but_forward(torch, &state)? {
            return invoke::call_with(module, args, kwargs);
        }
        match forward {
            Some(forward) if torch.own_forward.missing_or_empty(&state)? => {
                invoke::call_with_first(forward.bind(py), module, args, kwargs)
            }
            _ => {
                let forward = module.getattr(intern!(py, "forward"))?;
                invoke::call_with(&forward, args, kwargs)
            }
        }
    }

    /// The `forward` of `class`, where it is known what calling an instance comes down to.
    fn forward(
        &self,
        torch: &Torch,
        class: &Bound<'_, PyType>,
    ) -> PyResult<Option<&Py<PyFunction>>> {
        if let Some(plain) = self.0.get() {
            return Ok((plain.version == version(class)).then_some(&plain.forward));
        }
        let Some(plain) = PlainClass::examine(torch, class)? else {
            return Ok(None);
        };
        Ok(Some(&self.0.get_or_init(|| plain).forward))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0
            .get()
            .map_or(Ok(()), |plain| visit.call(&plain.forward))
    }
}

impl PlainClass {
    fn examine(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        let py = class.py();
        let getattribute = class.getattr(intern!(py, "__getattribute__"))?;
        let version_before = version(class);
        if !getattribute.is(&torch.plain_getattribute) || !calls_forward(torch, class)? {
            return Ok(None);
        }
        let forward = raw_attribute(class, "forward")?;
        Ok(match forward.map(Bound::cast_into::<PyFunction>) {
            // 0 is the number of a class that has none.
            Some(Ok(forward)) if version_before != 0 && version_before == version(class) => {
                Some(Self {
                    version: version_before,
                    forward: forward.unbind(),
                })
            }
            _ => None,
        })
    }
}

/// Whether instances of the class are called by `nn.Module`'s own methods.
fn calls_forward(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<bool> {
    let py = class.py();
    Ok(class
        .getattr(intern!(py, "__call__"))?
        .is(&torch.module_call)
        && class
            .getattr(intern!(py, "_call_impl"))?
            .is(&torch.module_call_impl))
}

/// What the class or the nearest of its bases has under `name`, itself and not what it is bound to.
fn raw_attribute<'py>(
    class: &Bound<'py, PyType>,
    name: &str,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    for base in class.mro() {
        let namespace = base.getattr(intern!(class.py(), "__dict__"))?;
        if namespace.contains(name)? {
            return namespace.get_item(name).map(Some);
        }
    }
    Ok(None)
}

/// CPython's version number of a class; 0 where it has none.
fn version(class: &Bound<'_, PyType>) -> u32 {
    // SAFETY: a `PyTypeObject` is alive behind `class`, and other threads only ever access the
    // aligned field as one word.
    let version = unsafe { AtomicU32::from_ptr(&raw mut (*class.as_type_ptr()).tp_version_tag) };
    // Relaxed: a class changed on another thread without synchronisation may be seen as it was.
    version.load(Ordering::Relaxed)
}

/// Whether `nn.Module.__call__` would do nothing but call `forward`, for a module whose instance
/// dict is `state`.
fn nothing_but_forward(torch: &Torch, state: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = state.py();
    for hooks in &torch.global_hooks {
        if !hooks.bind(py).is_empty() {
            return Ok(false);
        }
    }
    for hooks in &torch.module_hooks {
        if !hooks.missing_or_empty(state)? {
            return Ok(false);
        }
    }
    Ok(torch.compiled_call.missing_or_empty(state)?
        && torch.own_call_impl.missing_or_empty(state)?
        && torch
            .trace_map
            .missing_or_empty(torch.trace_globals.bind(py))?)
}

/// A variable of a module or an object: its name, and where in the dict it is likely to stand.
struct Variable {
    name: Py<PyString>,
    #[cfg_attr(Py_GIL_DISABLED, expect(dead_code, reason = "read with the GIL only"))]
    position: ffi::Py_ssize_t,
}

impl Variable {
    /// The position is where it stands in `example`.
    fn like_in(example: &Bound<'_, PyDict>, name: &str) -> Self {
        let name = PyString::intern(example.py(), name);
        let position = example.keys().index(&name);
        Self {
            name: name.unbind(),
            position: position.map_or(ffi::Py_ssize_t::MAX, usize::cast_signed),
        }
    }

    /// Whether `dict` has no such variable, or it is None or an empty dict.
    #[cfg(Py_GIL_DISABLED)]
    fn missing_or_empty(&self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        Ok(match dict.get_item(&self.name)? {
            None => true,
            Some(value) => match value.cast::<PyDict>() {
                Ok(hooks) => hooks.is_empty(),
                Err(_) => value.is_none(),
            },
        })
    }

    /// Whether `dict` has no such variable, or it is None or an empty dict.
    // Asked seven times a call. With the GIL held nothing takes a value out of the dict while it is
    // looked at, so references are borrowed; and a look at the likely place costs a third of a
    // look-up, which finds out if it was the wrong place.
    #[cfg(not(Py_GIL_DISABLED))]
    fn missing_or_empty(&self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        let name = self.name.as_ptr();
        let (mut position, mut key) = (self.position, std::ptr::null_mut());
        let mut value = std::ptr::null_mut();
        // SAFETY: `dict` and `name` are live objects of the types asked for; a position past the
        // end finds nothing. Borrowed results are used before any code can run that might change
        // `dict`: what is read of `value` is its type, its size and its address.
        unsafe {
            if ffi::PyDict_Next(
                dict.as_ptr(),
                &raw mut position,
                &raw mut key,
                &raw mut value,
            ) == 0
                || key != name
            {
                value = ffi::PyDict_GetItemWithError(dict.as_ptr(), name);
            }
            if value.is_null() {
                return if ffi::PyErr_Occurred().is_null() {
                    Ok(true)
                } else {
                    Err(PyErr::fetch(dict.py()))
                };
            }
            Ok(if ffi::PyDict_Check(value) == 0 {
                value == ffi::Py_None()
            } else {
                (*value.cast::<ffi::PyDictObject>()).ma_used == 0
            })
        }
    }
}

/// `object.__dict__`, past any `__getattribute__`.
fn instance_dict<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: `object` is a live object and the null context is what the function takes from C; it
    // returns a new reference, or null with an exception set.
    let dict = unsafe {
        Bound::from_owned_ptr_or_err(
            object.py(),
            ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut()),
        )
    }?;
    Ok(dict.cast_into()?)
}

/// Whether `value` is a `torch.Tensor`.
pub fn is_tensor(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.is_instance(Torch::get(value.py())?.tensor.bind(value.py()))
}

/// Whether this thread records gradients.
pub fn is_grad_enabled(py: Python<'_>) -> PyResult<bool> {
    Torch::get(py)?
        .is_grad_enabled
        .bind(py)
        .call0()?
        .is_truthy()
}

/// One call's `ferrohook.backward.BackwardPass`.
pub fn backward_pass<'py>(
    module: &Bound<'py, PyAny>,
    registry: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    invoke::call(Torch::get(py)?.backward_pass.bind(py), [module, registry])
}
