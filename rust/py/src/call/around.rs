//! Runs hooks of the requests of a batch between the hooks of the calling context.

use std::any::Any;

use ferrohook_core::Phase;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call::{Call, NextHook};
use crate::contexts::frame::Frame;
use crate::contexts::owners::Firing;
use crate::contexts::slot::FrameSlot;
use crate::torch::hooks::TorchHook;
use crate::torch::target::Target;

/// Kind of frame in whose calls hooks of others run.
pub trait Around: Send + Sync {
    /// Takes the hooks for a phase of a call that begins; None if there are none. `whole`: the hooks
    /// of the calling context.
    fn begin<'py>(
        &self,
        frame: &Bound<'py, Frame>,
        call: &Call<'_, 'py>,
        phase: Phase,
        whole: Option<&Firing<'py>>,
    ) -> PyResult<Option<Box<dyn Between<'py> + 'py>>>;

    /// True if it has hooks for the module with this id.
    fn has_hooks(&self, frame: &Bound<'_, Frame>, module: u64, phases: &[Phase]) -> bool;

    /// True if its hooks run in the calls of the entered frame.
    fn runs(&self, frame: &Bound<'_, Frame>) -> bool;
}

/// Hooks for one phase of one call. Gap `n` is ahead of hook `n` of the call's own context; the last
/// one comes after all of them.
pub trait Between<'py> {
    /// True if it has none in a gap.
    fn is_empty(&self, gap: usize) -> bool;

    /// Runs the `forward_pre` hooks of a gap, which may change the call's arguments.
    fn forward_pre(
        &self,
        call: &mut Call<'_, 'py>,
        gap: usize,
        target: &Target<'_, 'py>,
    ) -> PyResult<()>;

    /// Runs the `forward` hooks of a gap, returns the replaced output. `output`: None if the module
    /// did not return; then only `always_call` hooks run.
    fn forward(
        &self,
        call: &mut Call<'_, 'py>,
        gap: usize,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>>;
}

/// State that hooks of others keep from one phase of a call to the next.
pub trait Kept: Any {
    /// Takes note of what happened since they ran; called when the call ends too.
    fn write_back(&self, py: Python<'_>) -> PyResult<()>;
}

/// The slot of such a frame.
pub struct AroundSlot(pub &'static dyn Around);

impl FrameSlot for AroundSlot {
    fn has_hooks(&self, frame: &Bound<'_, PyAny>, module: u64, phases: &[Phase]) -> bool {
        let frame = frame.cast::<Frame>();
        frame.is_ok_and(|it| self.0.runs(it) && self.0.has_hooks(it, module, phases))
    }
}

/// Runs, between the hooks of the call's own context in a phase, the hooks of others and, in a repeat,
/// the stand-ins for hooks that do not run again.
pub struct Others<'py>(Option<Box<dyn Between<'py> + 'py>>);

/// Hooks of a phase in order: first torch's, then the calling context's, with the gaps between
/// them.
pub fn in_order<'s, 'py>(
    torch_hooks: &'s [TorchHook<'py>],
    whole: Option<&'s Firing<'py>>,
    Others(others): &'s Others<'py>,
) -> impl Iterator<Item = NextHook<'s, 'py>> {
    let mut own = whole.into_iter().flat_map(Firing::iter).map(NextHook::Own);
    let run = whole.and_then(Firing::run);
    let again = run.and_then(|run| Some((run, run.replay()?)));
    let mut hooks: Vec<_> = torch_hooks.iter().map(NextHook::Torch).collect();
    for gap in 0.. {
        if let Some((run, replay)) = again {
            let here = replay.again.iter().filter(|(at, _)| *at == gap);
            hooks.extend(here.map(|(_, hook)| NextHook::Again(run, *hook)));
        }
        if let Some(others) = others
            && !others.is_empty(gap)
        {
            hooks.push(NextHook::Others(&**others, gap));
        }
        let Some(next) = own.next() else { break };
        hooks.push(next);
    }
    hooks.into_iter()
}

impl<'py> Call<'_, 'py> {
    /// Takes the hooks that run in the gaps of a phase that begins; None if there are none. They come
    /// from the innermost frame that runs hooks of requests in its calls.
    pub(super) fn begin_around(
        &self,
        phase: Phase,
        whole: Option<&Firing<'py>>,
    ) -> PyResult<Option<Others<'py>>> {
        let py = self.module.py();
        if !self.registry.get().work().watched(phase) {
            return Ok(None);
        }
        let others = match self.frames.entered(py)? {
            Some(frames) => self.begin_around_in(frames, phase, whole)?,
            None => None,
        };
        let run = whole.and_then(Firing::run);
        let replay = run.and_then(|run| run.replay());
        let again = replay.is_some_and(|it| !it.again.is_empty());
        Ok((others.is_some() || again).then_some(Others(others)))
    }

    #[inline(never)] // out of the walk of a call in no scope
    fn begin_around_in(
        &self,
        frames: &Bound<'py, PyTuple>,
        phase: Phase,
        whole: Option<&Firing<'py>>,
    ) -> PyResult<Option<Box<dyn Between<'py> + 'py>>> {
        let innermost = frames.iter_borrowed().rev().find_map(|frame| {
            let frame = frame.cast::<Frame>().ok()?;
            let slot: &dyn Any = frame.get().slot()?;
            let AroundSlot(around) = slot.downcast_ref()?;
            around.runs(&frame).then_some((frame, *around))
        });
        innermost.map_or(Ok(None), |(frame, around)| {
            around.begin(&frame, self, phase, whole)
        })
    }

    #[cold]
    pub(super) fn forward_pre_around(
        &mut self,
        others: &Others<'py>,
        whole: Option<&Firing<'py>>,
        target: &Target<'_, 'py>,
    ) -> PyResult<()> {
        for next in in_order(&[], whole, others) {
            match next {
                NextHook::Torch(_) => {}
                NextHook::Own(hook) => self.forward_pre(std::iter::once(hook), target)?,
                NextHook::Others(others, gap) => others.forward_pre(self, gap, target)?,
                NextHook::Again(run, hook) => {
                    let (args, kwargs) = (&self.args, self.kwargs.as_ref());
                    run.run_again(hook, &self.input(), args, kwargs)?;
                }
            }
        }
        Ok(())
    }
}
