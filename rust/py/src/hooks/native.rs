//! Native hooks: hooks that run in Rust, each a Python class that implements [`Native`].

use std::marker::PhantomData;
use std::time::Duration;

use ferrohook_core::Phase;
use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{hook_type_error, type_name};

/// One turn of a native hook.
pub struct Turn<'a, 'py> {
    pub phase: Phase,
    /// The module that is called.
    pub module: &'a Bound<'py, PyAny>,
    /// Its arguments; none in the backward phases.
    pub args: &'a Bound<'py, PyTuple>,
    pub kwargs: Option<&'a Bound<'py, PyDict>>,
    /// The input, the output or the gradients, by phase. A lone positional argument is the input,
    /// else the tuple of them or, where there is none, the dict of keyword arguments.
    pub value: &'a Bound<'py, PyAny>,
    /// The gradient of the output, in the phase `backward`.
    pub grad_output: Option<&'a Bound<'py, PyAny>>,
    /// Time that the module took, where a hook [times](Native::times) it and it returned.
    pub took: Option<Duration>,
    /// Names hook, phase and module, for errors.
    pub describe: &'a dyn Fn() -> String,
}

impl<'py> Turn<'_, 'py> {
    /// The lone positional argument, else the tuple of them.
    pub fn input(&self) -> Bound<'py, PyAny> {
        input_of(self.args)
    }

    /// The error for a hook that returned what it may not.
    pub fn type_error(&self, expected: &str, got: &Bound<'_, PyAny>) -> PyErr {
        let message = format!(
            "{} {expected}, it returned {}",
            (self.describe)(),
            type_name(got)
        );
        hook_type_error(got.py(), message)
    }
}

/// The lone positional argument, else the tuple of them.
pub fn input_of<'py>(args: &Bound<'py, PyTuple>) -> Bound<'py, PyAny> {
    match args.get_item(0) {
        Ok(only) if args.len() == 1 => only,
        _ => args.as_any().clone(),
    }
}

/// Replacement for the value of a turn: a tuple of arguments in `forward_pre`, the output or the
/// gradients in other phases; None leaves it.
pub type Outcome<'py> = PyResult<Option<Bound<'py, PyAny>>>;

/// A hook as `torch.compile` traces it.
pub struct Traced<'py> {
    pub callback: Bound<'py, PyAny>,
    /// The form of its call, see `ferrohook.traced`.
    pub kind: &'static str,
    pub with_kwargs: bool,
    /// A graph with it does as an eager call does.
    pub faithful: bool,
}

impl<'py> Traced<'py> {
    /// A callable of PyTorch's contract.
    pub fn plain(callback: Bound<'py, PyAny>, with_kwargs: bool) -> Self {
        Self {
            callback,
            kind: "plain",
            with_kwargs,
            faithful: true,
        }
    }
}

/// A class of native hooks. It extends [`NativeHook`], by which registering recognises it.
pub trait Native: PyClass {
    /// Stays behind all other hooks and belongs to the package: not listed, cleared or copied, and
    /// its errors are nobody's hook's.
    const LAST: bool = false;

    /// The only phase that it can be registered for; None for any.
    fn phase(_slf: &Bound<'_, Self>) -> Option<Phase> {
        None
    }

    /// False where it is called as the Python callable that it is as well.
    fn native_in(_slf: &Bound<'_, Self>, _phase: Phase) -> bool {
        true
    }

    /// Needs the time that the module takes.
    fn times(_slf: &Bound<'_, Self>) -> bool {
        false
    }

    /// Does what the hook is for.
    fn run<'py>(slf: &Bound<'py, Self>, turn: &Turn<'_, 'py>) -> Outcome<'py>;

    /// The object that errors name.
    fn named<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyAny> {
        slf.as_any().clone()
    }

    /// The hook in a trace of `phase`; None where it has no part in it.
    fn traced<'py>(slf: &Bound<'py, Self>, phase: Phase) -> PyResult<Option<Traced<'py>>>;
}

/// [`Native`] for an object of whichever class.
pub trait AnyNative: Send + Sync {
    fn last(&self) -> bool;
    fn phase(&self, hook: &Bound<'_, PyAny>) -> PyResult<Option<Phase>>;
    fn native_in(&self, hook: &Bound<'_, PyAny>, phase: Phase) -> PyResult<bool>;
    fn times(&self, hook: &Bound<'_, PyAny>) -> PyResult<bool>;
    fn run<'py>(&self, hook: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py>;
    fn named<'py>(&self, hook: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>;
    fn traced<'py>(&self, hook: &Bound<'py, PyAny>, phase: Phase) -> PyResult<Option<Traced<'py>>>;
}

struct Class<T>(PhantomData<fn() -> T>);

impl<T: Native> AnyNative for Class<T> {
    fn last(&self) -> bool {
        T::LAST
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

/// The base of hooks that run in Rust, without a Python frame.
#[pyclass(frozen, subclass, module = "ferrohook._core")]
pub struct NativeHook(&'static dyn AnyNative);

impl NativeHook {
    /// The base of an object of class `T`.
    pub fn of<T: Native>() -> Self {
        Self(&Class::<T>(PhantomData))
    }

    /// The class that it was made for.
    pub fn class(&self) -> &'static dyn AnyNative {
        self.0
    }
}
