//! Inline caches of the path from a call to `forward`, guarded by CPython's version tags.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFunction, PyType};

use crate::cpython::empty_cache::EmptyCache;
use crate::torch::{Torch, plain_class};

/// Inline cache for calls of the instances of one class.
///
/// CPython gives a class a new version tag when it or a base changes, and never reuses a tag: an
/// equal tag means that looking up again would find the same.
#[pyclass(frozen, module = "ferrohook._core")]
#[derive(Default)]
pub struct CallCache {
    /// One entry for each version of the class, in order. With all used, later versions are not
    /// cached.
    examined: [OnceLock<CachedClass>; 4],
    latest: AtomicUsize,
}

/// Cached look-ups on a class whose `forward` is a plain function.
pub struct CachedClass {
    version: u32,
    pub forward: Py<PyFunction>,
    /// True if `__call__` and `_call_impl` are `nn.Module`'s.
    pub calls_forward: bool,
    /// True if they are on the original class of an instrumented module.
    called_by_torch: bool,
    /// True if `_call_impl` is `nn.Module`'s on that original class.
    call_impl_by_torch: bool,
}

impl CallCache {
    /// Returns the entry for the current version of `class`.
    pub fn get(&self, torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<Option<&CachedClass>> {
        // Acquire pairs with the release below.
        let latest = self.latest.load(Ordering::Acquire);
        let mut free = latest;
        if let Some(plain) = self.examined[latest].get() {
            if plain.version == version(class) {
                return Ok(Some(plain));
            }
            free = latest + 1;
        }
        self.examine(torch, class, free)
    }

    #[cold]
    fn examine(
        &self,
        torch: &Torch,
        class: &Bound<'_, PyType>,
        free: usize,
    ) -> PyResult<Option<&CachedClass>> {
        let Some(slot) = self.examined.get(free) else {
            return Ok(None);
        };
        let Some(plain) = CachedClass::examine(torch, class)? else {
            return Ok(None);
        };
        let plain = slot.get_or_init(|| plain);
        self.latest.fetch_max(free, Ordering::Release);
        // Another thread may have stored another version.
        Ok((plain.version == version(class)).then_some(plain))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let mut examined = self.examined.iter().filter_map(OnceLock::get);
        examined.try_for_each(|plain| visit.call(&plain.forward))
    }
}

#[pymethods]
impl CallCache {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.traverse(&visit)
    }
}

impl CachedClass {
    /// True if only `nn.Module`'s own methods lie between a call of the module, or of its
    /// `_call_impl`, and `forward`.
    pub fn by_torch(&self, through_call: bool) -> bool {
        if through_call {
            self.called_by_torch
        } else {
            self.call_impl_by_torch
        }
    }

    fn examine(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        let py = class.py();
        let getattribute = class.getattr(intern!(py, "__getattribute__"))?;
        let version_before = version(class);
        if !getattribute.is(&torch.plain_getattribute) {
            return Ok(None);
        }
        let plain = plain_class(class)?;
        let called_by_torch = calls_forward(torch, &plain)?;
        let call_impl_by_torch = has_call_impl(torch, &plain)?;
        let calls_forward = calls_forward(torch, class)?;
        let forward = raw_attribute(class, "forward")?;
        Ok(match forward.map(Bound::cast_into::<PyFunction>) {
            // 0: the class has no tag.
            Some(Ok(forward)) if version_before != 0 && version_before == version(class) => {
                Some(Self {
                    version: version_before,
                    forward: forward.unbind(),
                    calls_forward,
                    called_by_torch,
                    call_impl_by_torch,
                })
            }
            _ => None,
        })
    }
}

/// True if `__call__` and `_call_impl` of the class are `nn.Module`'s own.
pub fn calls_forward(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<bool> {
    let call = class.getattr(intern!(class.py(), "__call__"))?;
    Ok(torch.defines_call(&call)? && has_call_impl(torch, class)?)
}

fn has_call_impl(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<bool> {
    let call_impl = class.getattr(intern!(class.py(), "_call_impl"))?;
    torch.defines_call_impl(&call_impl)
}

/// Looks an attribute up along the MRO, unbound.
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

/// Reads CPython's version tag of a class; 0 if it has none.
fn version(class: &Bound<'_, PyType>) -> u32 {
    // SAFETY: `class` keeps its `PyTypeObject` alive, and other threads access the aligned field
    // only as one word.
    let version = unsafe { AtomicU32::from_ptr(&raw mut (*class.as_type_ptr()).tp_version_tag) };
    // Relaxed: an unsynchronised change on another thread may be missed.
    version.load(Ordering::Relaxed)
}

/// Path of a call, by the module's instance dict and torch's global dicts.
pub enum CallPath {
    /// `nn.Module.__call__` would only call the class's `forward`.
    Direct,
    /// `nn.Module.__call__` would only call the `forward` in the instance dict.
    InstanceForward,
    /// Everything else: hooks, tracing, replaced methods.
    Slow,
}

impl CallPath {
    fn of(empty: bool, instance_forward: bool) -> Self {
        match (empty, instance_forward) {
            (false, _) => Self::Slow,
            (true, false) => Self::Direct,
            (true, true) => Self::InstanceForward,
        }
    }
}

/// Inline cache for calls of one module.
#[derive(Default)]
pub struct InstanceCache {
    /// Hooks, and replacements of `_call_impl`.
    nothing: EmptyCache<4>,
    forward: AtomicBool,
}

impl InstanceCache {
    pub fn path(&self, torch: &Torch, state: &Bound<'_, PyDict>) -> PyResult<CallPath> {
        if !torch.idle(state.py())? {
            return Ok(CallPath::Slow);
        }
        if let Some(empty) = self.nothing.get(state) {
            return Ok(CallPath::of(empty, self.forward.load(Ordering::Relaxed)));
        }
        let replaced = [&torch.compiled_call, &torch.instance_call_impl];
        let variables = torch.module_hooks.iter().chain(replaced);
        let empty = self.nothing.look_up(state, variables)?;
        let forward = !torch.instance_forward.missing_or_empty(state)?;
        self.forward.store(forward, Ordering::Relaxed);
        Ok(CallPath::of(empty, forward))
    }
}
