//! `RequestBase`: the frame of one request of a prepared plan, and its captures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::capture::collector::Collector;
use crate::capture::keeping::{self, Keep};
use crate::capture::store::Budget;
use crate::contexts::frame::Frame;
use crate::error::hook_error;
use crate::hooks::native::Turn;
use crate::rows::at::{Chosen, Masks, MasksOfTokens};
use crate::rows::calls::merging::Places;
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::rows::membership::{MemberCall, Membership};
use crate::rows::places::{MemberPlace, OF_REQUEST, OwnRows, TokenPositions, Tokens};

/// Base of requests: a frame in which the hooks of a prepared plan fire, with collectors of its
/// own.
#[pyclass(frozen, subclass, extends = Frame, module = "ferrohook._core")]
pub struct RequestBase {
    /// An int, unique in the process, increasing.
    #[pyo3(get)]
    id: u64,
    /// Contents of the prepared plan.
    #[pyo3(get, name = "_plan")]
    plan: Py<PyAny>,
    /// Empty collectors of the plan, one for each of its captures.
    templates: Py<PyTuple>,
    /// Copies of the templates, each made when it is first needed.
    collectors: Box<[OnceLock<Py<Collector>>]>,
    /// Budget of all of them.
    budget: Option<Arc<Budget>>,
}

#[pymethods]
impl RequestBase {
    #[new]
    #[pyo3(signature = (shared, plan, templates, max_bytes = None, *_others))]
    fn new(
        shared: Bound<'_, Frame>,
        plan: Py<PyAny>,
        templates: Bound<'_, PyTuple>,
        max_bytes: Option<usize>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<(Self, Frame)> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        if shared.get().closed() {
            return Err(hook_error(
                shared.py(),
                "this plan was closed, or the model is gone that it was prepared for: prepare it again",
            ));
        }
        let request = Self {
            // Relaxed: the ids order nothing.
            id: IDS.fetch_add(1, Ordering::Relaxed),
            plan,
            collectors: templates.iter().map(|_| OnceLock::new()).collect(),
            templates: templates.unbind(),
            budget: max_bytes.map(|most| Arc::new(Budget::new(most))),
        };
        Ok((request, Frame::sharing(shared.unbind())))
    }

    /// Returns the collector of one of the plan's captures.
    #[pyo3(name = "_collector")]
    pub fn collector<'py>(
        &self,
        py: Python<'py>,
        capture: usize,
    ) -> PyResult<Bound<'py, Collector>> {
        let slot = &self.collectors[capture];
        if let Some(collector) = slot.get() {
            return Ok(collector.bind(py).clone());
        }
        let template = self.templates.bind(py).get_item(capture)?;
        // Made outside of the lock: allocation may run finalisers.
        let template = template.cast::<Collector>()?.get();
        let fresh = template.fresh(py, self.budget.clone())?;
        Ok(slot.get_or_init(|| fresh).bind(py).clone())
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        Frame::leave(slf.as_super())?;
        if error.is_some() {
            return Ok(());
        }
        Self::warn_of_silence(slf)
    }

    /// Warns of modules of its plan that never ran, as leaving it does; for batches. Once per plan:
    /// afterwards it costs the same for any number of modules.
    fn warn_of_silence(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let plan = this.plan.bind(py);
        if plan.getattr(intern!(py, "warned"))?.is_truthy()? {
            return Ok(());
        }
        let complete = |collector: &OnceLock<Py<Collector>>| {
            let collector = collector.get();
            collector.is_some_and(|collector| collector.get().complete())
        };
        let fired = plan.getattr(intern!(py, "fired"))?;
        if fired.is_truthy()? && this.collectors.iter().all(complete) {
            return Ok(());
        }
        slf.call_method0(intern!(py, "_warn_of_silence")).map(drop)
    }

    /// Sets the tokens at each of the plan's positions, tensors of bools. In the calls of a batch; or,
    /// with the `tokens` of a call, in the call that begins on this thread.
    ///
    /// `positions`: of the tokens of a call, (batch, length); `sequences`: id of their sequences.
    #[pyo3(signature = (masks, tokens = None, positions = None, sequences = OF_REQUEST))]
    fn set_masks(
        slf: &Bound<'_, Self>,
        masks: &Bound<'_, PyTuple>,
        tokens: Option<Py<PyAny>>,
        positions: Option<Py<PyAny>>,
        sequences: u64,
    ) -> PyResult<()> {
        let chosen = |mask: Bound<'_, PyAny>| {
            let mask = Mask::of_any(&mask)?;
            Ok(mask.map_or(Chosen::Nothing, |mask| Chosen::At(Arc::new(mask))))
        };
        let chosen = masks.iter().map(chosen).collect::<PyResult<_>>()?;
        let call = positions.map(|positions| (positions, sequences));
        let masks = Masks::Tokens(MasksOfTokens::new(chosen, call));
        let frame = slf.as_super().get();
        if tokens.is_none() {
            Membership::set_masks(frame, Some(masks));
        } else {
            let masks = Some(Arc::new(masks));
            Membership::set_call(frame, MemberCall { masks, tokens });
        }
        Ok(())
    }

    /// Tokens of the call around the one that starts on this thread, with their sequences.
    #[getter]
    fn tokens_around(slf: &Bound<'_, Self>) -> Option<Py<PyAny>> {
        Membership::around(slf.py(), slf.as_super().get())?.tokens
    }

    /// Has the call that begins on this thread the tokens of the one around it.
    fn inherit_tokens(slf: &Bound<'_, Self>) {
        let frame = slf.as_super().get();
        if let Some(call) = Membership::around(slf.py(), frame) {
            Membership::set_call(frame, call);
        }
    }

    /// Sets the numbers of tokens of its prompts.
    fn set_prompt_lengths(slf: &Bound<'_, Self>, lengths: Vec<i64>) {
        Membership::set_prompts(slf.as_super().get(), lengths.into());
    }

    /// Numbers of tokens of its prompts, as passed when it was opened or by its last batch with
    /// `lengths` for it; empty if unknown.
    #[getter]
    fn prompt_lengths(slf: &Bound<'_, Self>) -> Vec<i64> {
        Membership::prompts(slf.as_super().get()).to_vec()
    }

    // No `__clear__`: collectors have one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.plan)?;
        visit.call(&self.templates)?;
        let mut collectors = self.collectors.iter().filter_map(OnceLock::get);
        collectors.try_for_each(|collector| visit.call(collector))
    }
}

impl RequestBase {
    /// Returns the tokens at one of the plan's positions; `own`: the rows of the value, where they
    /// differ from the rows of the batch.
    pub fn chosen(slf: &Bound<'_, Self>, at: usize, own: Option<&OwnRows>) -> PyResult<Chosen> {
        let py = slf.py();
        let Some(masks) = Membership::masks(slf.as_super().get()) else {
            return Err(hook_error(
                py,
                "the positions of this call are not known: call the model that the plan was \
                 prepared for, not a part of it",
            ));
        };
        masks.chosen(py, at, own)
    }

    /// Returns the positions of the tokens of the running call that are at one of the plan's positions.
    fn positions_at(slf: &Bound<'_, Self>, at: usize) -> PyResult<Option<TokenPositions>> {
        let masks = Membership::masks(slf.as_super().get());
        masks.map_or(Ok(None), |masks| masks.positions(slf.py(), at))
    }

    /// Returns one of the plan's positions as places among the rows of the batch; None if they are
    /// not known as such.
    pub fn places(slf: &Bound<'_, Self>, at: usize) -> Option<Vec<MemberPlace>> {
        let masks = Membership::masks(slf.as_super().get())?;
        masks.places(at).map(<[_]>::to_vec)
    }
}

/// A value that a recorder stored.
pub struct Stored<'py> {
    pub collector: Bound<'py, Collector>,
    pub keep: Keep,
    /// Tokens that were taken of it; None for all.
    pub mask: Option<Arc<Mask>>,
}

impl<'py> Stored<'py> {
    fn whole(
        collector: Bound<'py, Collector>,
        index: usize,
        value: &Bound<'py, PyAny>,
        positions: Option<TokenPositions>,
        shared: bool,
    ) -> PyResult<Self> {
        let keep = keeping::record(&collector, index, value, positions, shared)?;
        Ok(Self {
            collector,
            keep,
            mask: None,
        })
    }
}

/// Collector of a capture; for a capture of a plan, the template of its requests' collectors.
pub struct Source {
    pub collector: Py<Collector>,
    pub place: Option<CallPlace>,
}

/// Place of a capture in a plan.
#[derive(FromPyObject)]
pub struct CallPlace {
    /// Index among its captures.
    capture: usize,
    /// Index of the captured positions; None for all.
    mask: Option<usize>,
}

impl Source {
    /// Returns the request that a hook or a capture of a plan fires for.
    pub fn request<'a, 'py>(
        owner: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<&'a Bound<'py, RequestBase>> {
        let nobody = || PyRuntimeError::new_err("a hook of a plan fires for requests");
        Ok(owner.ok_or_else(nobody)?.cast()?)
    }

    /// Stores what `value` gives, by the collector of the owner; None if nothing of it is stored.
    pub fn keep<'py>(
        &self,
        owner: Option<&Bound<'py, PyAny>>,
        index: usize,
        value: &Bound<'py, PyAny>,
        turn: Option<&Turn<'_, 'py>>,
    ) -> PyResult<Option<Stored<'py>>> {
        let py = value.py();
        let tokens = turn.and_then(Tokens::of);
        // Only a member of a batch has tokens: its tensors may be views of the whole batch's.
        let shared = tokens.is_some();
        let positions = tokens.and_then(|it| it.positions.clone());
        let Some(place) = &self.place else {
            let positions = positions.and_then(TokenPositions::of_whole);
            let collector = self.collector.bind(py).clone();
            return Stored::whole(collector, index, value, positions, shared).map(Some);
        };
        let request = Self::request(owner)?;
        let collector = request.get().collector(py, place.capture)?;
        let Some(at) = place.mask else {
            let positions = positions.and_then(TokenPositions::of_whole);
            return Stored::whole(collector, index, value, positions, shared).map(Some);
        };
        let own = tokens.and_then(|it| it.own.as_ref());
        let mask = match RequestBase::chosen(request, at, own)? {
            Chosen::Nothing => return Ok(None),
            Chosen::At(mask) => mask,
        };
        let positions = match positions {
            Some(all) => all.at(&mask.places(py)?, 0),
            None if collector.get().joins() => RequestBase::positions_at(request, at)?,
            None => None,
        };
        if positions.as_ref().is_some_and(|it| it.values.is_empty()) {
            return Ok(None);
        }
        let arguments = turn.map(CallArguments::of);
        let at = keeping::taken(&collector, index, &mask, value, arguments)?;
        let keep = keeping::record(&collector, index, &at, positions, shared)?;
        Ok(Some(Stored {
            collector,
            keep,
            mask: Some(mask),
        }))
    }

    /// Returns the collector of an owner.
    pub fn of_owner<'py>(
        &self,
        py: Python<'py>,
        owner: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Collector>> {
        match &self.place {
            Some(place) => Self::request(owner)?.get().collector(py, place.capture),
            None => Ok(self.collector.bind(py).clone()),
        }
    }

    /// Returns the captured places among the rows of a member; None if they are not known.
    pub fn places(&self, owner: &Bound<'_, PyAny>) -> PyResult<Option<Places>> {
        let Some(place) = &self.place else {
            return Ok(Some(None));
        };
        let Some(at) = place.mask else {
            return Ok(Some(None));
        };
        let places = RequestBase::places(Self::request(Some(owner))?, at);
        Ok(places.map(|places| Some((at, places))))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.collector)
    }
}
