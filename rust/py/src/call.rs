//! One call of a hooked module, from its arguments to its output.

use ferrohook_core::{Entry, Phase};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::hook::{Hook, Site};
use crate::invoke;
use crate::registry::Registry;
use crate::torch::{self, Callee};

/// Calls `inner` with the hooks of `registry` around it; hooks are told that `module` is called.
pub fn call<'py>(
    module: &Bound<'py, PyAny>,
    inner: &Bound<'py, PyAny>,
    callee: &Callee,
    registry: &Bound<'py, Registry>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = Call {
        module,
        inner,
        registry,
        args: args.clone(),
        kwargs: kwargs.cloned(),
    };
    call.run(callee)
}

struct Call<'a, 'py> {
    module: &'a Bound<'py, PyAny>,
    inner: &'a Bound<'py, PyAny>,
    registry: &'a Bound<'py, Registry>,
    args: Bound<'py, PyTuple>,
    kwargs: Option<Bound<'py, PyDict>>,
}

impl<'py> Call<'_, 'py> {
    fn run(mut self, callee: &Callee) -> PyResult<Bound<'py, PyAny>> {
        let hooks = &self.registry.get().hooks;
        let (output, backward) = match self.run_module(callee) {
            Ok(output) => output,
            Err(error) => {
                if hooks.occupied(Phase::Forward) {
                    self.run_always_called(hooks.snapshot(Phase::Forward).iter(), None);
                }
                return Err(error);
            }
        };
        let output = if hooks.occupied(Phase::Forward) {
            self.forward(output)?
        } else {
            output
        };
        match backward {
            None => Ok(output),
            Some(backward) => {
                let tap = backward.getattr(intern!(output.py(), "tap_outputs"))?;
                invoke::call(&tap, [&output])
            }
        }
    }

    /// Up to the module's output, with what taps the gradients where a backward hook wants them.
    fn run_module(
        &mut self,
        callee: &Callee,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let hooks = &self.registry.get().hooks;
        if hooks.occupied(Phase::ForwardPre) {
            self.forward_pre()?;
        }
        let backward = if hooks.occupied(Phase::BackwardPre) || hooks.occupied(Phase::Backward) {
            self.tap_inputs()?
        } else {
            None
        };
        let output = callee.call(self.inner, &self.args, self.kwargs.as_ref())?;
        Ok((output, backward))
    }

    fn site<'e>(&'e self, entry: &'e Entry<Hook>) -> Site<'e, 'py> {
        Site {
            entry,
            module: self.module,
        }
    }

    /// The keyword arguments as a dict that with_kwargs hooks may keep or change.
    fn kwargs(&mut self) -> Bound<'py, PyDict> {
        self.kwargs
            .get_or_insert_with(|| PyDict::new(self.module.py()))
            .clone()
    }

    fn forward_pre(&mut self) -> PyResult<()> {
        let snapshot = self.registry.get().hooks.snapshot(Phase::ForwardPre);
        for entry in snapshot.iter() {
            let Some(inside) = entry.enter() else {
                continue;
            };
            let result = self.invoke_forward_pre(entry);
            drop(inside);
            let settled = match result {
                Ok(replaced) => replaced,
                error => self.site(entry).settle(error)?,
            };
            if let Some((args, kwargs)) = settled {
                self.args = args;
                if kwargs.is_some() {
                    self.kwargs = kwargs;
                }
            }
        }
        Ok(())
    }

    fn invoke_forward_pre(&mut self, entry: &Entry<Hook>) -> PyResult<Option<Replaced<'py>>> {
        let hook = entry.hook();
        let (callback, typed) = hook.callback(self.module.py());
        if typed {
            let input = input_of(&self.args);
            let result = invoke::call(callback, [&input])?;
            return self.typed_input(entry, result).map(Some);
        }
        if hook.options.with_kwargs {
            let kwargs = self.kwargs();
            let result = invoke::call(callback, [self.module, &self.args, &kwargs])?;
            return args_and_kwargs(&result, self.inner);
        }
        let result = invoke::call(callback, [self.module, &self.args])?;
        Ok(if result.is_none() {
            None
        } else {
            Some((into_args(result)?, None))
        })
    }

    /// The arguments that a `ForwardPreHook` returned, if they have the call's shape.
    fn typed_input(
        &self,
        entry: &Entry<Hook>,
        result: Bound<'py, PyAny>,
    ) -> PyResult<Replaced<'py>> {
        let arity = self.args.len();
        if let Ok(args) = result.cast::<PyTuple>() {
            if args.len() == arity {
                return Ok((args.clone(), None));
            }
        } else if arity == 1 && torch::is_tensor(&result)? {
            return Ok((into_args(result)?, None));
        }
        let expected = if arity == 1 {
            "returns a tensor or a tuple of one".to_owned()
        } else {
            format!("returns a tuple of {arity}, as many as the call has arguments")
        };
        Err(self.site(entry).type_error(&expected, &result))
    }

    fn forward(&mut self, mut output: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let snapshot = self.registry.get().hooks.snapshot(Phase::Forward);
        let mut entries = snapshot.iter();
        while let Some(entry) = entries.next() {
            let Some(inside) = entry.enter() else {
                continue;
            };
            let result = self.invoke_forward(entry, Some(&output));
            drop(inside);
            let settled = match result {
                Ok(replaced) => replaced,
                error => match self.site(entry).settle(error) {
                    Ok(settled) => settled,
                    Err(error) => {
                        self.run_always_called(entries, Some(output));
                        return Err(error);
                    }
                },
            };
            if let Some(replaced) = settled {
                output = replaced;
            }
        }
        Ok(output)
    }

    /// Calls one forward hook; `output` is None where the module did not return.
    fn invoke_forward(
        &mut self,
        entry: &Entry<Hook>,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.module.py();
        let none;
        let output = if let Some(output) = output {
            output
        } else {
            none = py.None().into_bound(py);
            &none
        };
        let hook = entry.hook();
        let (callback, typed) = hook.callback(py);
        if typed {
            let result = invoke::call(callback, [&input_of(&self.args), output])?;
            return if result.is_none() {
                Ok(None)
            } else {
                Err(self
                    .site(entry)
                    .type_error("observes and returns None", &result))
            };
        }
        let result = if hook.options.with_kwargs {
            let kwargs = self.kwargs();
            invoke::call(callback, [self.module, &self.args, &kwargs, output])?
        } else {
            invoke::call(callback, [self.module, &self.args, output])?
        };
        Ok((!result.is_none()).then_some(result))
    }

    /// After an exception, whichever: those of the hooks not reached that are `always_call`. What
    /// they raise is told in a warning and never replaces the exception.
    fn run_always_called<'e>(
        &mut self,
        entries: impl Iterator<Item = &'e Entry<Hook>>,
        mut output: Option<Bound<'py, PyAny>>,
    ) {
        for entry in entries.filter(|entry| entry.hook().options.always_call) {
            let Some(inside) = entry.enter() else {
                continue;
            };
            let result = self.invoke_forward(entry, output.as_ref());
            drop(inside);
            match self.site(entry).settle(result) {
                Ok(None) => {}
                Ok(replaced) => output = replaced,
                Err(error) => self.site(entry).warn_silenced(&error),
            }
        }
    }

    /// Puts the inputs through the autograd node that backward hooks fire from, where gradients
    /// are recorded at all.
    fn tap_inputs(&mut self) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !torch::is_grad_enabled(self.module.py())? {
            return Ok(None);
        }
        let backward = torch::backward_pass(self.module, self.registry.as_any())?;
        let kwargs = self.kwargs();
        let tap = backward.getattr(intern!(kwargs.py(), "tap_inputs"))?;
        let (args, kwargs) = invoke::call(&tap, [&self.args, &kwargs])?.extract()?;
        self.args = args;
        self.kwargs = Some(kwargs);
        Ok(Some(backward))
    }
}

/// New positional arguments, and new keyword arguments where the hook returned those too.
type Replaced<'py> = (Bound<'py, PyTuple>, Option<Bound<'py, PyDict>>);

/// What a typed hook calls the input: the only positional argument, else the tuple of them.
fn input_of<'py>(args: &Bound<'py, PyTuple>) -> Bound<'py, PyAny> {
    match args.get_item(0) {
        Ok(only) if args.len() == 1 => only,
        _ => args.as_any().clone(),
    }
}

/// What a plain pre-hook returned, as PyTorch takes it: a tuple, or a single argument.
fn into_args(result: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyTuple>> {
    match result.cast_into::<PyTuple>() {
        Ok(args) => Ok(args),
        Err(error) => {
            let only = error.into_inner();
            PyTuple::new(only.py(), [&only])
        }
    }
}

/// What a plain `with_kwargs` pre-hook returned, with PyTorch's errors.
fn args_and_kwargs<'py>(
    result: &Bound<'py, PyAny>,
    inner: &Bound<'py, PyAny>,
) -> PyResult<Option<Replaced<'py>>> {
    if result.is_none() {
        return Ok(None);
    }
    let py = result.py();
    let Ok((args, kwargs)) = result
        .cast::<PyTuple>()
        .map_err(PyErr::from)
        .and_then(|pair| pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>())
    else {
        return Err(PyRuntimeError::new_err(format!(
            "forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {}.",
            result.str()?
        )));
    };
    // PyTorch hands both to `forward(*args, **kwargs)`, which says what is wrong with them.
    let args = match args.cast_into::<PyTuple>() {
        Ok(args) => args,
        Err(error) => {
            let args = error.into_inner();
            let items = args.try_iter().map_err(|_| {
                PyTypeError::new_err(format!(
                    "{} argument after * must be an iterable, not {}",
                    forward_name(inner),
                    crate::error::type_name(&args)
                ))
            })?;
            PyTuple::new(py, items.collect::<PyResult<Vec<_>>>()?)?
        }
    };
    let kwargs = match kwargs.cast_into::<PyDict>() {
        Ok(kwargs) => kwargs,
        Err(error) => {
            let given = error.into_inner();
            let kwargs = PyDict::new(py);
            given
                .cast::<pyo3::types::PyMapping>()
                .map_err(PyErr::from)
                .and_then(|mapping| kwargs.update(mapping))
                .map_err(|_| {
                    PyTypeError::new_err(format!(
                        "{} argument after ** must be a mapping, not {}",
                        forward_name(inner),
                        crate::error::type_name(&given)
                    ))
                })?;
            kwargs
        }
    };
    Ok(Some((args, Some(kwargs))))
}

/// `forward` of `inner`, as Python's own errors about calling it begin.
fn forward_name(inner: &Bound<'_, PyAny>) -> String {
    let name = || -> PyResult<String> {
        let forward = inner.getattr("forward")?;
        let module = forward.getattr("__module__")?;
        Ok(format!("{module}.{}()", forward.getattr("__qualname__")?))
    };
    name().unwrap_or_else(|_| "forward()".to_owned())
}
