//! Native hooks: hooks that run in Rust; objects of Python classes, which implement [`Native`].

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use ferrohook_core::Phase;
use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{hook_type_error, type_name};

/// Stand-in, in a repeated forward, for a native hook that only observed.
pub trait Again: Send + Sync {
    /// Runs with the hook's value, in a call with these arguments. Returns the action of a repeat of
    /// this run; None if it has none.
    fn run<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Option<Arc<dyn Again>>>;
}

/// One invocation of a native hook.
pub struct Turn<'a, 'py> {
    pub phase: Phase,
    /// The called module.
    pub module: &'a Bound<'py, PyAny>,
    /// Its arguments; none in the backward phases.
    pub args: &'a Bound<'py, PyTuple>,
    pub kwargs: Option<&'a Bound<'py, PyDict>>,
    /// Input, output or gradients, by phase. The input is the lone positional argument, else the
    /// tuple of them or, without any, the dict of keyword arguments.
    pub value: &'a Bound<'py, PyAny>,
    /// Gradient of the output, in the phase `backward`.
    pub grad_output: Option<&'a Bound<'py, PyAny>>,
    /// Takes, in a checkpointed forward, its repeat's stand-in for a hook that only observes.
    pub again: Option<&'a dyn Fn(Arc<dyn Again>)>,
    /// Run time of the module, if a hook [times](Native::times) it and it returned.
    pub took: Option<Duration>,
    /// The owner, a scope, request or capture, that the hook fires for; None for a global hook.
    pub owner: Option<&'a Bound<'py, PyAny>>,
    /// Part of the call, see `Call::part`.
    pub part: Option<&'a dyn Any>,
    /// Describes hook, phase and module, for errors.
    pub describe: &'a dyn Fn() -> String,
}

impl<'py> Turn<'_, 'py> {
    /// Returns the lone positional argument, else the tuple of them.
    pub fn input(&self) -> Bound<'py, PyAny> {
        input_of(self.args)
    }

    /// Makes the error for an invalid return value.
    pub fn type_error(&self, expected: &str, got: &Bound<'_, PyAny>) -> PyErr {
        let message = format!("{}: {expected}, got {}", (self.describe)(), type_name(got));
        hook_type_error(got.py(), message)
    }
}

/// Returns the lone positional argument, else the tuple of them.
pub fn input_of<'py>(args: &Bound<'py, PyTuple>) -> Bound<'py, PyAny> {
    match args.get_item(0) {
        Ok(only) if args.len() == 1 => only,
        _ => args.as_any().clone(),
    }
}

/// Replacement of the value: a tuple of arguments in `forward_pre`, the output or the gradients in
/// other phases; None leaves it unchanged.
pub type Outcome<'py> = PyResult<Option<Bound<'py, PyAny>>>;

/// Form of a hook that `torch.compile` traces.
pub struct Traced<'py> {
    pub callback: Bound<'py, PyAny>,
    /// Calling convention, see `ferrohook.attach.traced`.
    pub kind: &'static str,
    pub with_kwargs: bool,
    /// True if a graph with it behaves like an eager call.
    pub faithful: bool,
    /// Key of the operator that stands in the graph for hooks of this form, after all others.
    pub operator: Option<String>,
    /// True if the operator stands at the hook's own place, only for this hook.
    pub in_place: bool,
}

/// Form of a hook in a trace; None to be left out.
pub type Trace<'py> = PyResult<Option<Traced<'py>>>;

impl<'py> Traced<'py> {
    /// Traces a callable of PyTorch's contract.
    pub fn plain(callback: Bound<'py, PyAny>, with_kwargs: bool) -> Self {
        Self {
            callback,
            kind: "plain",
            with_kwargs,
            faithful: true,
            operator: None,
            in_place: false,
        }
    }

    /// Breaks the graph at a native hook.
    pub fn breaking(hook: Bound<'py, PyAny>) -> Self {
        Self {
            faithful: false,
            ..Self::plain(hook, false)
        }
    }
}

/// Extension of a class of native hooks for code that knows its type.
pub type Extension = dyn Any + Send + Sync;

/// Native hook: an object of a class that extends [`NativeHook`]. Methods with an `object` get the
/// hook itself.
pub trait Native: Any + Send + Sync {
    /// True for a hook of the package itself that stays after all others, and is not cleared or
    /// copied.
    fn last(&self) -> bool {
        false
    }

    /// True for a hook of the package itself: it is not listed, and its errors are not attributed to
    /// a hook.
    fn hidden(&self) -> bool {
        self.last()
    }

    /// True if an [operator](Traced::operator) stands for it in graphs.
    fn operator(&self) -> bool {
        false
    }

    /// Returns the only phase that it can be registered for; None for any.
    fn phase(&self) -> Option<Phase> {
        None
    }

    /// False to have it called as a Python callable instead.
    fn native_in(&self, _phase: Phase) -> bool {
        true
    }

    /// True if it needs the run time of the module.
    fn times(&self) -> bool {
        false
    }

    /// Returns the hook that runs for the module of this name; None if it runs itself.
    fn for_module(&self, _object: &Bound<'_, PyAny>, _name: &str) -> PyResult<Option<Py<PyAny>>> {
        Ok(None)
    }

    /// True if its calls may change a value.
    fn changes(&self) -> bool {
        false
    }

    /// True if its calls may run Python code of the user.
    fn runs_python(&self) -> bool {
        false
    }

    /// True if it needs gradients of the value.
    fn needs_gradients(&self) -> bool {
        false
    }

    /// Returns the frame whose state it reads, if that is not its owner.
    fn state_of<'py>(&self, _py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        None
    }

    /// Returns what others ask of the class, beside calling it.
    fn extension(&self) -> Option<&'static Extension> {
        None
    }

    /// Runs the hook.
    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py>;

    /// Returns the object to name in errors.
    fn named<'py>(&self, object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        object.clone()
    }

    /// Returns its form in a trace of `phase`. One that depends on more than the value, as on the
    /// positions of a call's tokens, breaks the graph, which does not know the calls that will run it.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(Some(Traced::breaking(object.clone())))
    }
}

/// Finds the native hook that an object is.
pub type AsNative = for<'a, 'py> fn(&'a Bound<'py, PyAny>) -> PyResult<&'a dyn Native>;

/// Base of hooks that run in Rust, without a Python frame.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct NativeHook(AsNative);

impl NativeHook {
    /// Makes the base of an object of class `T`.
    pub fn of<T: Native + PyClass<Frozen = True>>() -> Self {
        Self(|object| Ok(object.cast::<T>()?.get()))
    }

    /// Finds native hooks of its class.
    pub fn class(&self) -> AsNative {
        self.0
    }
}
