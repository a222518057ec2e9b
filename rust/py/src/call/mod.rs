//! Call of a hooked module, from its arguments to its output.

pub mod around;
pub mod backward;
pub mod stop;

use std::any::Any;
use std::time::{Duration, Instant};

use ferrohook_core::{Entry, Inside, Phase};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call::around::{Between, Kept, Others};
use crate::call::backward::Tap;
use crate::contexts::current::Frames;
use crate::contexts::log::PhaseRun;
use crate::contexts::owners::{Firing, Owned};
use crate::contexts::regions;
use crate::cpython::invoke;
use crate::hooks::hook::Hook;
use crate::hooks::native::{AsNative, Turn, input_of};
use crate::hooks::site::Site;
use crate::registry::Registry;
use crate::torch;
use crate::torch::hooks::{TorchBackward, TorchHook, TorchHooks};
use crate::torch::target::Target;

/// Calls `target` with the hooks of `registry` around it; `module` is the one that hooks get.
pub fn call<'py>(
    module: &Bound<'py, PyAny>,
    target: &Target<'_, 'py>,
    registry: &Bound<'py, Registry>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = Call {
        module,
        registry,
        frames: Frames::default(),
        args: args.clone(),
        kwargs: kwargs.cloned(),
        took: None,
        part: None,
        kept: None,
        after_pre_hooks: false,
    };
    call.run(target)
        .or_else(|error| stop::stopped(module.py(), &error, registry.get().module()).ok_or(error))
}

/// A call in progress.
pub struct Call<'a, 'py> {
    pub module: &'a Bound<'py, PyAny>,
    pub registry: &'a Bound<'py, Registry>,
    pub frames: Frames<'py>,
    pub args: Bound<'py, PyTuple>,
    pub kwargs: Option<Bound<'py, PyDict>>,
    /// Run time of the module, if a hook needs it and the module returned.
    pub took: Option<Duration>,
    /// Row context when hooks see only one request's rows; `None` for the whole call.
    pub part: Option<&'a dyn Any>,
    /// State of hooks of others.
    pub kept: Option<Box<dyn Kept>>,
    /// True once it had pre-hooks, which may have entered a scope or given torch hooks.
    pub after_pre_hooks: bool,
}

/// Next hook of a phase: torch's hooks come first.
#[derive(Clone, Copy)]
pub enum NextHook<'s, 'py> {
    Torch(&'s TorchHook<'py>),
    Own(Owned<'s, 'py>),
    /// Hooks of others, in a gap.
    Others(&'s dyn Between<'py>, usize),
    /// Stand-in for a hook in a repeat.
    Again(&'s PhaseRun<'py>, usize),
}

fn in_order<'s, 'py>(
    torch_hooks: &'s [TorchHook<'py>],
    snapshot: Option<&'s Firing<'py>>,
) -> impl Iterator<Item = NextHook<'s, 'py>> {
    let own = snapshot.into_iter().flat_map(Firing::iter);
    torch_hooks
        .iter()
        .map(NextHook::Torch)
        .chain(own.map(NextHook::Own))
}

// The path of hooks of PyTorch's contract is inlined into the walk of the forward phase: it is most
// of such a hook's overhead. Paths of other kinds of hooks are out of line.
impl<'py> Call<'_, 'py> {
    fn run(mut self, target: &Target<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
        if target.torch_hooks().is_none() && self.registry.get().work().is_none() {
            let output = target.call(self.module, &self.args, self.kwargs.as_ref());
            // A hook registered meanwhile fires in the phase that begins now.
            if self.registry.get().work().is_none() {
                return output;
            }
            return self.run_after(target, output.map(|output| (output, None)));
        }
        let ran = self.run_module(target);
        let output = self.run_after(target, ran)?;
        self.write_back().map(|()| output)
    }

    /// Copies writes to kept arguments into the tensors that they stand for.
    pub fn write_back(&self) -> PyResult<()> {
        let kept = self.kept.as_ref();
        kept.map_or(Ok(()), |kept| kept.write_back(self.module.py()))
    }

    /// Runs the call from the module's output to its return value.
    fn run_after(
        &mut self,
        target: &Target<'_, 'py>,
        ran: PyResult<Ran<'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.after_pre_hooks {
            self.frames = Frames::default();
        }
        let snapshot = self.begin(Phase::Forward)?;
        let torch_hooks = match target.torch_hooks() {
            Some(hooks) => hooks.forward()?,
            None if self.after_pre_hooks => target.added_hooks(self.module)?,
            None => Vec::new(),
        };
        if let Some(others) = self.begin_around(Phase::Forward, snapshot.as_ref())? {
            return self.run_after_around(&others, snapshot.as_ref(), &torch_hooks, ran);
        }
        let (output, tap) = match ran {
            Ok(output) => output,
            Err(error) => {
                let mut hooks = in_order(&torch_hooks, snapshot.as_ref());
                self.after_error(&mut hooks, None, &error);
                return Err(error);
            }
        };
        let output = match (&snapshot, &*torch_hooks) {
            (None, []) => output,
            (Some(snapshot), []) => match snapshot.all_global() {
                Some(hooks) => self.forward(hooks.map(NextHook::Own), output)?,
                None => self.forward(snapshot.iter().map(NextHook::Own), output)?,
            },
            _ => self.forward(in_order(&torch_hooks, snapshot.as_ref()), output)?,
        };
        match tap {
            None => Ok(output),
            Some(tap) => tap.output(self.module, &self.args, output),
        }
    }

    /// Runs the call from the module's output to its return value, with hooks of others.
    #[cold]
    fn run_after_around(
        &mut self,
        others: &Others<'py>,
        snapshot: Option<&Firing<'py>>,
        torch_hooks: &[TorchHook<'py>],
        ran: PyResult<Ran<'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut hooks = around::in_order(torch_hooks, snapshot, others);
        let (output, tap) = match ran {
            Ok(output) => output,
            Err(error) => {
                self.after_error(&mut hooks, None, &error);
                return Err(error);
            }
        };
        let output = self.forward(hooks, output)?;
        match tap {
            None => Ok(output),
            Some(tap) => tap.output(self.module, &self.args, output),
        }
    }

    /// Runs the call up to the module's output.
    fn run_module(&mut self, target: &Target<'_, 'py>) -> PyResult<Ran<'py>> {
        let torch_backward = match target.torch_hooks() {
            Some(hooks) => Some(self.torch_pre(hooks, target)?),
            None => None,
        };
        let snapshot = self.begin(Phase::ForwardPre)?;
        self.after_pre_hooks = torch_backward.is_some() || snapshot.is_some();
        if let Some(others) = self.begin_around(Phase::ForwardPre, snapshot.as_ref())? {
            self.forward_pre_around(&others, snapshot.as_ref(), target)?;
        } else if let Some(snapshot) = &snapshot {
            match snapshot.all_global() {
                Some(hooks) => self.forward_pre(hooks, target)?,
                None => self.forward_pre(snapshot.iter(), target)?,
            }
        }
        let (py, registry) = (self.module.py(), self.registry.get());
        let work = registry.work();
        let mut pre = registry.fires(py, work, Phase::BackwardPre, &self.frames)?;
        let mut full = registry.fires(py, work, Phase::Backward, &self.frames)?;
        if regions::any_open() {
            pre = registry.taps_in_region(py, Phase::BackwardPre, pre)?;
            full = registry.taps_in_region(py, Phase::Backward, full)?;
        }
        let tap = if torch_backward.is_some() || pre || full {
            self.tap_input(torch_backward.unwrap_or_default(), pre, full)?
        } else {
            None
        };
        let since = work.timed().then(Instant::now);
        let output = target.call(self.module, &self.args, self.kwargs.as_ref())?;
        self.took = since.map(|since| since.elapsed());
        Ok((output, tap))
    }

    /// Runs torch's own pre-hooks. Returns torch's backward hooks, read before these ran.
    #[cold]
    fn torch_pre(
        &mut self,
        hooks: &TorchHooks<'py>,
        target: &Target<'_, 'py>,
    ) -> PyResult<TorchBackward<'py>> {
        let backward = hooks.backward()?;
        for hook in hooks.forward_pre()? {
            let replaced = self.invoke_plain_pre(&hook.callback, hook.with_kwargs, target)?;
            self.replace_input(replaced);
        }
        Ok(backward)
    }

    fn begin(&self, phase: Phase) -> PyResult<Option<Firing<'py>>> {
        let registry = self.registry.get();
        let live = registry.begin(self.module.py(), phase, &self.frames)?;
        if regions::any_open() {
            return registry.begin_in_region(self.module, phase, live);
        }
        Ok(live)
    }

    pub fn site<'e>(&'e self, entry: &'e Entry<Hook>) -> Site<'e, 'py> {
        Site {
            entry,
            module: self.module,
        }
    }

    /// Applies `on_error` to the exception of a hook: `Ok` if the call goes on without it.
    #[cold]
    pub fn apply_on_error(&self, hook: Owned<'_, 'py>, error: PyErr) -> PyResult<()> {
        let registry = self.registry.get();
        let applied = registry.apply_on_error(&self.site(hook.entry), hook.owner, error);
        if let (Some(run), Err(error)) = (hook.run, &applied) {
            run.note_error(hook.entry, hook.owner, error);
        }
        applied
    }

    /// Returns the keyword arguments as a dict that `with_kwargs` hooks may store or change.
    fn kwargs(&mut self) -> Bound<'py, PyDict> {
        self.kwargs
            .get_or_insert_with(|| PyDict::new(self.module.py()))
            .clone()
    }

    /// Runs hooks of `forward_pre`, which may replace the arguments.
    pub fn forward_pre<'s>(
        &mut self,
        hooks: impl Iterator<Item = Owned<'s, 'py>>,
        target: &Target<'_, 'py>,
    ) -> PyResult<()>
    where
        'py: 's,
    {
        self.forward_pre_seen(hooks, target, |_, _, _| Ok(()))
    }

    /// Does as [`Self::forward_pre`]; `seen` gets each hook that ran, the call, and true if the hook
    /// replaced the arguments.
    pub fn forward_pre_seen<'s>(
        &mut self,
        hooks: impl Iterator<Item = Owned<'s, 'py>>,
        target: &Target<'_, 'py>,
        mut seen: impl FnMut(Owned<'s, 'py>, &Self, bool) -> PyResult<()>,
    ) -> PyResult<()>
    where
        'py: 's,
    {
        let inside = Inside::here();
        for hook in hooks {
            let Some(invocation) = hook.enter(&inside) else {
                continue;
            };
            let result = self.invoke_forward_pre(hook, target);
            drop(invocation);
            match result {
                Ok(replaced) => {
                    let any = replaced.is_some();
                    self.replace_input(replaced);
                    seen(hook, self, any)?;
                }
                Err(error) => self.apply_on_error(hook, error)?,
            }
        }
        Ok(())
    }

    /// Sets the arguments that a hook returned.
    pub fn replace_input(&mut self, replaced: Option<Replaced<'py>>) {
        if let Some((args, kwargs)) = replaced {
            self.args = args;
            if kwargs.is_some() {
                self.kwargs = kwargs;
            }
        }
    }

    fn invoke_forward_pre(
        &mut self,
        owned: Owned<'_, 'py>,
        target: &Target<'_, 'py>,
    ) -> PyResult<Option<Replaced<'py>>> {
        let hook = owned.entry.hook();
        let callback = hook.object().bind(self.module.py());
        let Some(native) = hook.as_native() else {
            return self.invoke_plain_pre(callback, hook.options.with_kwargs, target);
        };
        let input = self.input();
        let replaced = self.invoke_native(native, owned, Phase::ForwardPre, &input)?;
        let args = replaced.map(Bound::cast_into).transpose()?;
        Ok(args.map(|args| (args, None)))
    }

    /// Returns the input as native hooks get it.
    fn input(&self) -> Bound<'py, PyAny> {
        match &self.kwargs {
            Some(kwargs) if self.args.is_empty() => kwargs.as_any().clone(),
            _ => input_of(&self.args),
        }
    }

    /// Calls a hook of PyTorch's contract.
    fn invoke_plain_pre(
        &mut self,
        callback: &Bound<'py, PyAny>,
        with_kwargs: bool,
        target: &Target<'_, 'py>,
    ) -> PyResult<Option<Replaced<'py>>> {
        if with_kwargs {
            let kwargs = self.kwargs();
            let result = invoke::call(callback, [self.module, &self.args, &kwargs])?;
            return args_and_kwargs(&result, target.module(self.module));
        }
        let result = invoke::call(callback, [self.module, &self.args])?;
        Ok(if result.is_none() {
            None
        } else {
            Some((into_args(result)?, None))
        })
    }

    /// Runs hooks of `forward`. Returns the output after them.
    #[inline]
    pub fn forward<'s>(
        &mut self,
        hooks: impl Iterator<Item = NextHook<'s, 'py>>,
        output: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        'py: 's,
    {
        self.forward_seen(hooks, output, |_, _| ())
    }

    /// Does as [`Self::forward`]; `seen` gets each hook, and the output if it replaced that.
    #[expect(
        clippy::inline_always,
        reason = "the walk itself, which is compiled for those who see nothing"
    )]
    #[inline(always)]
    pub fn forward_seen<'s>(
        &mut self,
        mut hooks: impl Iterator<Item = NextHook<'s, 'py>>,
        mut output: Bound<'py, PyAny>,
        mut seen: impl FnMut(NextHook<'s, 'py>, Option<&Bound<'py, PyAny>>),
    ) -> PyResult<Bound<'py, PyAny>>
    where
        'py: 's,
    {
        let inside = Inside::here();
        while let Some(next) = hooks.next() {
            match self.take(next, &inside, Some(&output)) {
                Ok(None) => seen(next, None),
                Ok(Some(replaced)) => {
                    seen(next, Some(&replaced));
                    output = replaced;
                }
                Err(error) => {
                    self.after_error(&mut hooks, Some(output), &error);
                    return Err(error);
                }
            }
        }
        Ok(output)
    }

    /// Runs one forward hook; `output` is None if the module did not return.
    #[expect(
        clippy::inline_always,
        reason = "part of the walk: a seventh of its time per hook"
    )]
    #[inline(always)]
    fn take(
        &mut self,
        next: NextHook<'_, 'py>,
        inside: &Inside,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let none;
        let output = if let Some(output) = output {
            output
        } else {
            none = self.module.py().None().into_bound(self.module.py());
            &none
        };
        let hook = match next {
            NextHook::Own(hook) => hook,
            NextHook::Torch(hook) => {
                return self.invoke_plain(&hook.callback, hook.with_kwargs, output);
            }
            NextHook::Others(others, gap) => return others.forward(self, gap, Some(output)),
            NextHook::Again(run, hook) => {
                let (args, kwargs) = (&self.args, self.kwargs.as_ref());
                return run.run_again(hook, output, args, kwargs).map(|()| None);
            }
        };
        let Some(invocation) = hook.enter(inside) else {
            return Ok(None);
        };
        let result = self.invoke_forward(hook, output);
        drop(invocation);
        match result {
            Ok(replaced) => Ok(replaced),
            Err(error) => self.apply_on_error(hook, error).map(|()| None),
        }
    }

    #[expect(
        clippy::inline_always,
        reason = "part of the walk: a seventh of its time per hook"
    )]
    #[inline(always)]
    fn invoke_forward(
        &mut self,
        owned: Owned<'_, 'py>,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let hook = owned.entry.hook();
        match hook.as_native() {
            None => {
                let callback = hook.object().bind(self.module.py());
                self.invoke_plain(callback, hook.options.with_kwargs, output)
            }
            Some(native) => self.invoke_native(native, owned, Phase::Forward, output),
        }
    }

    #[inline(never)]
    fn invoke_native(
        &self,
        as_native: AsNative,
        hook: Owned<'_, 'py>,
        phase: Phase,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let note = |again| {
            if let Some(run) = hook.run {
                run.note_again(hook.entry, hook.owner, again);
            }
        };
        let turn = Turn {
            phase,
            again: hook.run.is_some().then_some(&note),
            module: self.module,
            args: &self.args,
            kwargs: self.kwargs.as_ref(),
            value,
            grad_output: None,
            took: self.took,
            owner: hook.object(),
            part: self.part,
            describe: &|| self.site(hook.entry).describe(),
        };
        let object = hook.entry.hook().target().bind(self.module.py());
        as_native(object)?.run(object, &turn)
    }

    /// Calls a hook of PyTorch's contract.
    #[expect(
        clippy::inline_always,
        reason = "part of the walk: a seventh of its time per hook"
    )]
    #[inline(always)]
    fn invoke_plain(
        &mut self,
        callback: &Bound<'py, PyAny>,
        with_kwargs: bool,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let result = if with_kwargs {
            let kwargs = self.kwargs();
            invoke::call(callback, [self.module, &self.args, &kwargs, output])?
        } else {
            invoke::call(callback, [self.module, &self.args, output])?
        };
        Ok((!result.is_none()).then_some(result))
    }

    /// Runs the remaining `always_call` hooks after `error`; none where a repeat ends early, as the
    /// forward did not fail there.
    #[cold]
    fn after_error<'s>(
        &mut self,
        hooks: &mut dyn Iterator<Item = NextHook<'s, 'py>>,
        output: Option<Bound<'py, PyAny>>,
        error: &PyErr,
    ) where
        'py: 's,
    {
        if !torch::ends_recomputation(error, self.module.py()) {
            self.run_always_called(hooks, output);
        }
    }

    /// Runs the remaining `always_call` hooks after any exception. Their own exceptions become
    /// warnings and never replace it.
    #[cold]
    pub fn run_always_called<'s>(
        &mut self,
        hooks: &mut dyn Iterator<Item = NextHook<'s, 'py>>,
        mut output: Option<Bound<'py, PyAny>>,
    ) where
        'py: 's,
    {
        let inside = Inside::here();
        for next in hooks {
            let always = match next {
                NextHook::Own(hook) => hook.entry.hook().options.always_call,
                NextHook::Torch(hook) => hook.always_call,
                NextHook::Others(others, gap) => {
                    let _ = others.forward(self, gap, None);
                    continue;
                }
                NextHook::Again(..) => continue,
            };
            if !always {
                continue;
            }
            match self.take(next, &inside, output.as_ref()) {
                Ok(None) => {}
                Ok(replaced) => output = replaced,
                Err(error) => match next {
                    NextHook::Own(hook) => self.site(hook.entry).warn_silenced(&error),
                    NextHook::Torch(hook) => hook.warn_silenced(&error),
                    NextHook::Others(..) | NextHook::Again(..) => {}
                },
            }
        }
    }

    /// Puts the inputs through the autograd node that backward hooks fire from, if gradients are
    /// recorded; `pre` and `full`: the call has hooks of `backward_pre`, of `backward`.
    #[cold]
    fn tap_input(
        &mut self,
        torch_hooks: TorchBackward<'py>,
        pre: bool,
        full: bool,
    ) -> PyResult<Option<Box<Tap<'py>>>> {
        let Some(tap) = Tap::new(
            self.module,
            self.registry,
            &self.frames,
            torch_hooks,
            [pre, full],
        )?
        else {
            return Ok(None);
        };
        if let Some((args, kwargs)) = tap.input(&self.args, self.kwargs.as_ref())? {
            self.args = args;
            self.kwargs = Some(kwargs);
        }
        Ok(Some(Box::new(tap)))
    }
}

/// A module's output, with the tap of its gradients if the call has backward hooks.
type Ran<'py> = (Bound<'py, PyAny>, Option<Box<Tap<'py>>>);

/// New positional arguments, and new keyword arguments if the hook returned both.
pub type Replaced<'py> = (Bound<'py, PyTuple>, Option<Bound<'py, PyDict>>);

/// Converts the result of a plain pre-hook, as PyTorch does: a tuple, or a single argument.
fn into_args(result: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyTuple>> {
    match result.cast_into::<PyTuple>() {
        Ok(args) => Ok(args),
        Err(error) => {
            let only = error.into_inner();
            PyTuple::new(only.py(), [&only])
        }
    }
}

/// Unpacks the result of a plain `with_kwargs` pre-hook, with PyTorch's errors.
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
    // PyTorch passes both to `forward(*args, **kwargs)`, which raises these errors.
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
            let other = error.into_inner();
            let kwargs = PyDict::new(py);
            other
                .cast::<pyo3::types::PyMapping>()
                .map_err(PyErr::from)
                .and_then(|mapping| kwargs.update(mapping))
                .map_err(|_| {
                    PyTypeError::new_err(format!(
                        "{} argument after ** must be a mapping, not {}",
                        forward_name(inner),
                        crate::error::type_name(&other)
                    ))
                })?;
            kwargs
        }
    };
    Ok(Some((args, Some(kwargs))))
}

/// Names `forward` of `inner` as Python's own TypeErrors do.
fn forward_name(inner: &Bound<'_, PyAny>) -> String {
    let name = || -> PyResult<String> {
        let forward = inner.getattr("forward")?;
        let module = forward.getattr("__module__")?;
        Ok(format!("{module}.{}()", forward.getattr("__qualname__")?))
    };
    name().unwrap_or_else(|_| "forward()".to_owned())
}
