//! What this crate knows of torch. Imported at first use: the extension itself needs no torch.
//!
//! Nothing that can change is relied on from one call to the next. What another library did to the
//! module's hook dicts, to torch's global ones, to `forward` on the instance or the class, or to
//! `nn.Module.__call__` is seen by the next call.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyFunction, PyModule, PyString, PyTuple};
use pyo3::{ffi, types::PyType};

use crate::dict::{Known, Moment, VERSIONS, Variable, instance_dict, none_or_empty};
use crate::invoke;

struct Torch {
    /// `torch.nn.modules.module`.
    module: Py<PyModule>,
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
    /// A module's children.
    children: Variable,
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
                module: module.clone().unbind(),
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
                children: Variable::like_in(&example, "_modules"),
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
#[pyclass(frozen, module = "ferrohook._core")]
#[derive(Default)]
pub struct Callee {
    /// What was found, for one version of the class after the other. After the last one looking up
    /// is never spared again.
    examined: [OnceLock<PlainClass>; 4],
    latest: AtomicUsize,
}

/// A class whose `forward` is a plain function.
pub struct PlainClass {
    version: u32,
    forward: Py<PyFunction>,
    /// Whether `__call__` is `nn.Module`'s.
    calls_forward: bool,
    /// Whether it is for the class that an instrumented module had before.
    called_by_torch: bool,
    /// Whether `_call_impl` is, there.
    call_impl_by_torch: bool,
}

/// What stands between the hooks before and the hooks after.
pub enum Target<'a, 'py> {
    /// The module inside a wrapper, called as a whole: with its own torch hooks and whatever else.
    Module(&'a Bound<'py, PyAny>, &'a Callee, &'a Seen),
    /// The module's own `forward`, which is that of its class.
    Forward(&'a PlainClass),
    /// The same, where torch's hooks have to run too or something stands in for `forward`: as
    /// torch does, what is there before the hooks run.
    Special(Bound<'py, PyAny>, TorchHooks<'py>),
    /// What somebody put in place of `nn.Module.__call__`: it comes back by `_call_impl`, and no
    /// hook runs around it.
    Outer(Bound<'py, PyAny>),
}

impl<'a, 'py> Target<'a, 'py> {
    /// What a call of an instrumented module comes down to, whose instance dict is `state`.
    pub fn of(
        module: &Bound<'py, PyAny>,
        state: Bound<'py, PyDict>,
        callee: &'a Callee,
        seen: &Seen,
        through_call: bool,
    ) -> PyResult<Self> {
        let py = module.py();
        let torch = Torch::get(py)?;
        let class = module.get_type();
        let known = callee.known(torch, &class)?;
        if !known.is_some_and(|known| known.by_torch(through_call)) {
            let plain = plain_class(&class)?;
            let call = plain.getattr(intern!(py, "__call__"))?;
            if through_call && !call.is(&torch.module_call) {
                return Ok(Self::Outer(bind(&call, module)?));
            }
            let call_impl = plain.getattr(intern!(py, "_call_impl"))?;
            if !call_impl.is(&torch.module_call_impl) {
                return Ok(Self::Special(bind(&call_impl, module)?, TorchHooks::none()));
            }
        }
        if let Some(forward) = Self::forward(module, known, seen.says(torch, &state)?)? {
            return Ok(forward);
        }
        // What `nn.Module.compile` or somebody else put in place of torch's own call.
        for variable in [&torch.compiled_call, &torch.own_call_impl] {
            if through_call
                && !variable.missing_or_empty(&state)?
                && let Some(call_impl) = state.get_item(&variable.name)?
            {
                return Ok(Self::Special(call_impl, TorchHooks::none()));
            }
        }
        // Notes the name of the module while torch.jit traces, and else just calls forward.
        let forward = module.getattr(intern!(py, "_slow_forward"))?;
        Ok(Self::Special(forward, TorchHooks(Some(state))))
    }

    /// `module.forward`, where calling the module comes down to that.
    fn forward(
        module: &Bound<'py, PyAny>,
        known: Option<&'a PlainClass>,
        says: Says,
    ) -> PyResult<Option<Self>> {
        Ok(match (says, known) {
            (Says::More, _) => None,
            (Says::Forward, Some(known)) => Some(Self::Forward(known)),
            _ => {
                let forward = module.getattr(intern!(module.py(), "forward"))?;
                Some(Self::Special(forward, TorchHooks::none()))
            }
        })
    }

    pub fn call(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Module(inner, callee, seen) => callee.call(inner, seen, args, kwargs),
            Self::Forward(known) => {
                invoke::call_with_first(known.forward.bind(module.py()), module, args, kwargs)
            }
            Self::Special(callable, _) | Self::Outer(callable) => {
                invoke::call_with(callable, args, kwargs)
            }
        }
    }

    /// Torch's hooks that run beside the module's own, if any do.
    pub fn torch_hooks(&self) -> Option<&TorchHooks<'py>> {
        match self {
            Self::Special(_, hooks) => hooks.0.is_some().then_some(hooks),
            Self::Module(..) | Self::Forward(..) | Self::Outer(_) => None,
        }
    }

    /// The module whose `forward` is called in the end, when `called` is called.
    pub fn module<'b>(&'b self, called: &'b Bound<'py, PyAny>) -> &'b Bound<'py, PyAny> {
        match self {
            Self::Module(inner, ..) => inner,
            _ => called,
        }
    }
}

/// A hook from one of torch's dicts.
pub struct TorchHook<'py> {
    pub callback: Bound<'py, PyAny>,
    pub with_kwargs: bool,
    pub always_call: bool,
}

impl TorchHook<'_> {
    /// What `nn.Module` says where an `always_call` hook fails after something else did.
    pub fn warn_silenced(&self, error: &PyErr) {
        let py = self.callback.py();
        let text = format!(
            "forward hook with ``always_call=True`` raised an exception that was silenced as \
             another error was raised in forward: {error}"
        );
        let warned = py
            .import("warnings")
            .and_then(|warnings| warnings.call_method1("warn", (text,)));
        if let Err(error) = warned {
            error.write_unraisable(py, None);
        }
    }
}

/// The hooks that torch's dicts hold for one module, whose instance dict this is, read when their
/// phase begins: those for all modules go ahead of its own.
pub struct TorchHooks<'py>(Option<Bound<'py, PyDict>>);

/// Torch's backward hooks for one call.
#[derive(Default)]
pub struct TorchBackward<'py> {
    pub pre: Vec<Bound<'py, PyAny>>,
    pub full: Vec<Bound<'py, PyAny>>,
    /// Of the deprecated kind, which hangs on the autograd node that made the output.
    pub non_full: Vec<Bound<'py, PyAny>>,
}

impl<'py> TorchHooks<'py> {
    /// Those that what is called runs by itself.
    fn none() -> Self {
        Self(None)
    }

    pub fn forward_pre(&self) -> PyResult<Vec<TorchHook<'py>>> {
        let Some(state) = &self.0 else {
            return Ok(Vec::new());
        };
        let torch = Torch::get(state.py())?;
        let hooks = torch.hooks_in(state, FORWARD_PRE)?.into_iter();
        hooks
            .map(|(id, callback)| {
                Ok(TorchHook {
                    with_kwargs: lists(state, "_forward_pre_hooks_with_kwargs", &id)?,
                    always_call: false,
                    callback,
                })
            })
            .collect()
    }

    pub fn forward(&self) -> PyResult<Vec<TorchHook<'py>>> {
        let Some(state) = &self.0 else {
            return Ok(Vec::new());
        };
        let torch = Torch::get(state.py())?;
        let global = torch.module.bind(state.py()).dict();
        let hooks = torch.hooks_in(state, FORWARD)?.into_iter();
        hooks
            .map(|(id, callback)| {
                Ok(TorchHook {
                    with_kwargs: lists(state, "_forward_hooks_with_kwargs", &id)?
                        || lists(&global, "_global_forward_hooks_with_kwargs", &id)?,
                    always_call: lists(state, "_forward_hooks_always_called", &id)?
                        || lists(&global, "_global_forward_hooks_always_called", &id)?,
                    callback,
                })
            })
            .collect()
    }

    pub fn backward(&self) -> PyResult<TorchBackward<'py>> {
        let Some(state) = &self.0 else {
            return Ok(TorchBackward::default());
        };
        let py = state.py();
        let torch = Torch::get(py)?;
        let mut hooks = TorchBackward::default();
        let pre = torch.hooks_in(state, BACKWARD_PRE)?;
        hooks.pre = pre.into_iter().map(|(_, hook)| hook).collect();
        let global = torch.global_hooks[BACKWARD].bind(py).clone();
        let own = dict_in(state, torch.module_hooks[BACKWARD].name.bind(py))?;
        let is_full = [
            torch
                .module
                .bind(py)
                .dict()
                .get_item("_global_is_full_backward_hook")?,
            state.get_item("_is_full_backward_hook")?,
        ];
        for (dict, is_full) in [Some(global), own].into_iter().zip(is_full) {
            let non_full = is_full.is_some_and(|full| full.is(PyBool::new(py, false)));
            let kind = if non_full {
                &mut hooks.non_full
            } else {
                &mut hooks.full
            };
            kind.extend(dict.iter().flat_map(PyDictMethods::values));
        }
        Ok(hooks)
    }
}

impl TorchBackward<'_> {
    pub fn any_full(&self) -> bool {
        !(self.pre.is_empty() && self.full.is_empty())
    }
}

/// The places of the kinds of hooks in [`Torch::global_hooks`] and [`Torch::module_hooks`].
const FORWARD: usize = 0;
const FORWARD_PRE: usize = 1;
const BACKWARD: usize = 2;
const BACKWARD_PRE: usize = 3;

impl Torch {
    /// The (id, hook) pairs of a kind, for the module whose instance dict is `state`.
    fn hooks_in<'py>(
        &self,
        state: &Bound<'py, PyDict>,
        kind: usize,
    ) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        let global = self.global_hooks[kind].bind(state.py()).clone();
        let own = dict_in(state, self.module_hooks[kind].name.bind(state.py()))?;
        let dicts = [Some(global), own].into_iter().flatten();
        dicts
            .flat_map(|dict| dict.items())
            .map(|item| item.extract())
            .collect()
    }
}

/// Whether the dict that `namespace` has under `name` has `id`.
fn lists(namespace: &Bound<'_, PyDict>, name: &str, id: &Bound<'_, PyAny>) -> PyResult<bool> {
    let ids = dict_in(namespace, PyString::new(namespace.py(), name).as_any())?;
    ids.map_or(Ok(false), |ids| ids.contains(id))
}

fn dict_in<'py>(
    namespace: &Bound<'py, PyDict>,
    name: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let found = namespace.get_item(name)?;
    Ok(found.and_then(|found| found.cast_into().ok()))
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
        seen: &Seen,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let torch = Torch::get(module.py())?;
        let class = module.get_type();
        let known = self.known(torch, &class)?;
        let calls_forward = match known {
            Some(plain) => plain.calls_forward,
            None => calls_forward(torch, &class)?,
        };
        if calls_forward {
            let says = seen.says(torch, &instance_dict(module)?)?;
            if let Some(forward) = Target::forward(module, known, says)? {
                return forward.call(module, args, kwargs);
            }
        }
        invoke::call_with(module, args, kwargs)
    }

    /// What is known of `class` as it is now.
    fn known(&self, torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<Option<&PlainClass>> {
        // Acquire pairs with the release below.
        let latest = self.latest.load(Ordering::Acquire);
        let mut free = latest;
        if let Some(plain) = self.examined[latest].get() {
            if plain.version == version(class) {
                return Ok(Some(plain));
            }
            free = latest + 1;
        }
        self.learn(torch, class, free)
    }

    #[cold]
    fn learn(
        &self,
        torch: &Torch,
        class: &Bound<'_, PyType>,
        free: usize,
    ) -> PyResult<Option<&PlainClass>> {
        let Some(slot) = self.examined.get(free) else {
            return Ok(None);
        };
        let Some(plain) = PlainClass::examine(torch, class)? else {
            return Ok(None);
        };
        let plain = slot.get_or_init(|| plain);
        self.latest.fetch_max(free, Ordering::Release);
        // Another thread may have examined another version.
        Ok((plain.version == version(class)).then_some(plain))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let mut examined = self.examined.iter().filter_map(OnceLock::get);
        examined.try_for_each(|plain| visit.call(&plain.forward))
    }
}

#[pymethods]
impl Callee {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.traverse(&visit)
    }
}

/// A method of a class, for one instance.
fn bind<'py>(
    method: &Bound<'py, PyAny>,
    module: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    match method.getattr_opt(intern!(module.py(), "__get__"))? {
        Some(get) => get.call1((module,)),
        None => Ok(method.clone()),
    }
}

impl PlainClass {
    /// Whether nothing but `nn.Module`'s own methods stands between a call of the module, or of its
    /// `_call_impl`, and `forward`.
    fn by_torch(&self, through_call: bool) -> bool {
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
            // 0 is the number of a class that has none.
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

/// Whether instances of the class are called by `nn.Module`'s own methods.
fn calls_forward(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<bool> {
    let call = class.getattr(intern!(class.py(), "__call__"))?;
    Ok(call.is(&torch.module_call) && has_call_impl(torch, class)?)
}

fn has_call_impl(torch: &Torch, class: &Bound<'_, PyType>) -> PyResult<bool> {
    let call_impl = class.getattr(intern!(class.py(), "_call_impl"))?;
    Ok(call_impl.is(&torch.module_call_impl))
}

/// The class that the modules of an instrumented class had before; any other class itself.
pub fn plain_class<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyType>> {
    match class.getattr_opt(intern!(class.py(), "_made_from"))? {
        Some(bases) => Ok(bases.get_item(1)?.cast_into()?),
        None => Ok(class.clone()),
    }
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

/// What instance dict and torch's own dicts say of a call of the module.
enum Says {
    /// `nn.Module.__call__` would do nothing but call the class's `forward`.
    Forward,
    /// The same with a `forward` that somebody put into the instance dict.
    OwnForward,
    /// There is more to do.
    More,
}

impl Says {
    fn of(empty: bool, own_forward: bool) -> Self {
        match (empty, own_forward) {
            (false, _) => Self::More,
            (true, false) => Self::Forward,
            (true, true) => Self::OwnForward,
        }
    }
}

/// What the instance dict of one module had that its call depends on, for as long as the dict stays
/// as it is.
#[derive(Default)]
pub struct Seen {
    state: Known,
    /// The dicts of torch's hooks, and whatever else was neither missing nor None. The instance dict
    /// keeps them alive.
    present: [AtomicPtr<ffi::PyObject>; 4],
    own_forward: AtomicBool,
}

// Relaxed: under the GIL; without it no dict is ever known to be as it was.
impl Seen {
    fn says(&self, torch: &Torch, state: &Bound<'_, PyDict>) -> PyResult<Says> {
        let py = state.py();
        let mut global = torch.global_hooks.iter();
        if !global.all(|hooks| hooks.bind(py).is_empty())
            || !torch
                .trace_map
                .missing_or_empty(torch.trace_globals.bind(py))?
        {
            return Ok(Says::More);
        }
        if !self.state.is(state) {
            return self.look(torch, state);
        }
        let empty = self.present.iter().all(|value| {
            let value = value.load(Ordering::Relaxed);
            // SAFETY: the dict, which is as it was, keeps it alive.
            let value = unsafe { Borrowed::from_ptr_or_opt(py, value) };
            value.is_none_or(|value| none_or_empty(&value))
        });
        Ok(Says::of(empty, self.own_forward.load(Ordering::Relaxed)))
    }

    fn look(&self, torch: &Torch, state: &Bound<'_, PyDict>) -> PyResult<Says> {
        let now = Moment::of(state);
        let replaced = [&torch.compiled_call, &torch.own_call_impl];
        let mut present = [ptr::null_mut(); 4];
        let mut places = present.iter_mut();
        let (mut empty, mut fits) = (true, true);
        for variable in torch.module_hooks.iter().chain(replaced) {
            let Some(value) = variable.get(state)?.filter(|value| !value.is_none()) else {
                continue;
            };
            empty &= none_or_empty(&value);
            match places.next() {
                Some(place) => *place = value.as_ptr(),
                None => fits = false,
            }
        }
        let own_forward = !torch.own_forward.missing_or_empty(state)?;
        if VERSIONS && fits {
            self.state.set(&now);
            for (place, value) in self.present.iter().zip(present) {
                place.store(value, Ordering::Relaxed);
            }
            self.own_forward.store(own_forward, Ordering::Relaxed);
        }
        Ok(Says::of(empty, own_forward))
    }
}

/// What a module whose instance dict is `state` has as its children; None for one that keeps them
/// elsewhere.
pub fn children<'py>(state: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let children = Torch::get(state.py())?.children.get(state)?;
    Ok(children.and_then(|children| children.cast_into().ok()))
}

/// Calls a module of an instrumented class as its plain class would.
pub fn call_plain<'py>(
    module: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = module
        .getattr(intern!(module.py(), "__class__"))?
        .getattr(intern!(module.py(), "__call__"))?;
    invoke::call_with_first(&call, module, args, kwargs)
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

/// One call's `ferrohook.backward.BackwardPass`, made in `scopes`.
pub fn backward_pass<'py>(
    module: &Bound<'py, PyAny>,
    registry: &Bound<'py, PyAny>,
    scopes: &Bound<'py, PyTuple>,
    torch_hooks: &TorchBackward<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let class = Torch::get(py)?.backward_pass.bind(py);
    class.call1((
        module,
        registry,
        scopes,
        &torch_hooks.pre,
        &torch_hooks.full,
    ))
}

/// Hangs torch's deprecated backward hooks on the autograd node that made the output.
pub fn hook_non_full<'py>(
    module: &Bound<'py, PyAny>,
    hooks: &[Bound<'py, PyAny>],
    args: &Bound<'py, PyTuple>,
    output: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let backward = module.py().import("ferrohook.backward")?;
    backward.call_method1("hook_non_full", (module, hooks, args, output))?;
    Ok(())
}

/// What a call returns that a capture has ended.
pub fn stopped(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("ferrohook.activations")?.getattr("STOPPED")
}
