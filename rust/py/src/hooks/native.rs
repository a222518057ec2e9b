//! Native hooks: hooks that run in Rust; Python classes that implement [`Native`].

use std::any::Any;
use std::marker::PhantomData;
use std::time::Duration;

use ferrohook_core::Phase;
use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{hook_type_error, type_name};

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
    /// Run time of the module, if a hook [times](Native::times) it and it returned.
    pub took: Option<Duration>,
    /// The owner, a scope, request or capture, that the hook fires for; None: for everybody.
    pub owner: Option<&'a Bound<'py, PyAny>>,
    /// For a value that is somebody's part of a call: what is known of it.
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
        let message = format!(
            "{} {expected}, it returned {}",
            (self.describe)(),
            type_name(got)
        );
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
    /// Calling convention, see `ferrohook.traced`.
    pub kind: &'static str,
    pub with_kwargs: bool,
    /// True if a graph with it behaves like an eager call.
    pub faithful: bool,
    /// Key of the operator that stands in the graph for hooks of this form, behind all others.
    pub operator: Option<String>,
    /// True if the operator stands at the hook's own place, for it alone.
    pub in_place: bool,
}

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
}

/// What others ask of a class of native hooks: they know its type.
pub type Extension = dyn Any + Send + Sync;

/// Class of native hooks; it extends [`NativeHook`].
pub trait Native: PyClass {
    /// True for a hook of the package itself: it stays behind all others, is not listed, cleared or
    /// copied, and its errors are not attributed to a hook.
    const LAST: bool = false;

    /// True if an [operator](Traced::operator) stands for it in graphs.
    const OPERATOR: bool = false;

    /// Returns the only phase that it can be registered for; None for any.
    fn phase(_slf: &Bound<'_, Self>) -> Option<Phase> {
        None
    }

    /// False to have it called as a Python callable instead.
    fn native_in(_slf: &Bound<'_, Self>, _phase: Phase) -> bool {
        true
    }

    /// True if it needs the run time of the module.
    fn times(_slf: &Bound<'_, Self>) -> bool {
        false
    }

    /// Returns the hook that runs for the module of this name; None if it runs itself.
    fn for_module<'py>(_slf: &Bound<'py, Self>, _name: &str) -> PyResult<Option<Bound<'py, Self>>> {
        Ok(None)
    }

    /// True if its calls may change a value.
    fn changes(_slf: &Bound<'_, Self>) -> bool {
        false
    }

    /// True if its calls may run Python code of the user.
    fn runs_python(_slf: &Bound<'_, Self>) -> bool {
        false
    }

    /// True if it needs gradients of the value.
    fn needs_gradients(_slf: &Bound<'_, Self>) -> bool {
        false
    }

    /// Returns what others ask of the class, beside calling it.
    fn extension() -> Option<&'static Extension> {
        None
    }

    /// Runs the hook.
    fn run<'py>(slf: &Bound<'py, Self>, turn: &Turn<'_, 'py>) -> Outcome<'py>;

    /// Returns the object to name in errors.
    fn named<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyAny> {
        slf.as_any().clone()
    }

    /// Returns its form in a trace of `phase`; None to be left out.
    fn traced<'py>(slf: &Bound<'py, Self>, phase: Phase) -> PyResult<Option<Traced<'py>>>;
}

/// [`Native`] for an object of any class (type-erased).
pub trait AnyNative: Send + Sync {
    fn last(&self) -> bool;
    fn operator(&self) -> bool;
    fn phase(&self, hook: &Bound<'_, PyAny>) -> PyResult<Option<Phase>>;
    fn native_in(&self, hook: &Bound<'_, PyAny>, phase: Phase) -> PyResult<bool>;
    fn times(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool>;
    fn for_module(&self, hook: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Py<PyAny>>>;
    fn changes(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool>;
    fn runs_python(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool>;
    fn needs_gradients(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool>;
    fn extension(&self) -> Option<&'static Extension>;
    fn run<'py>(&self, hook: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py>;
    fn named<'py>(&self, hook: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>;
    fn traced<'py>(&self, hook: &Bound<'py, PyAny>, phase: Phase) -> PyResult<Option<Traced<'py>>>;
}

struct Class<T>(PhantomData<fn() -> T>);

impl<T: Native> AnyNative for Class<T> {
    fn last(&self) -> bool {
        T::LAST
    }

    fn operator(&self) -> bool {
        T::OPERATOR
    }

    fn phase(&self, hook: &Bound<'_, PyAny>) -> PyResult<Option<Phase>> {
        Ok(T::phase(hook.cast()?))
    }

    fn native_in(&self, hook: &Bound<'_, PyAny>, phase: Phase) -> PyResult<bool> {
        Ok(T::native_in(hook.cast()?, phase))
    }

    fn times(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(T::times(hook.cast()?))
    }

    fn for_module(&self, hook: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Py<PyAny>>> {
        let hook = T::for_module(hook.cast()?, name)?;
        Ok(hook.map(|hook| hook.into_any().unbind()))
    }

    fn changes(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(T::changes(hook.cast()?))
    }

    fn runs_python(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(T::runs_python(hook.cast()?))
    }

    fn needs_gradients(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(T::needs_gradients(hook.cast()?))
    }

    fn extension(&self) -> Option<&'static Extension> {
        T::extension()
    }

    fn run<'py>(&self, hook: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        T::run(hook.cast()?, turn)
    }

    fn named<'py>(&self, hook: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        Ok(T::named(hook.cast()?))
    }

    fn traced<'py>(&self, hook: &Bound<'py, PyAny>, phase: Phase) -> PyResult<Option<Traced<'py>>> {
        T::traced(hook.cast()?, phase)
    }
}

/// Base of hooks that run in Rust, without a Python frame.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct NativeHook(&'static dyn AnyNative);

impl NativeHook {
    /// Makes the base of an object of class `T`.
    pub fn of<T: Native>() -> Self {
        Self(&Class::<T>(PhantomData))
    }

    /// The implementation of its class.
    pub fn class(&self) -> &'static dyn AnyNative {
        self.0
    }
}
