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
use crate::rows::calls::merging::Places;
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::rows::membership::Membership;
use crate::rows::places::{TokenPositions, Tokens};
use crate::rows::tracker::TokenTracker;

/// Base of requests: a frame in which the hooks of a prepared plan fire, with collectors of its
/// own.
#[pyclass(frozen, subclass, extends = TokenTracker, module = "ferrohook._core")]
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
    ) -> PyResult<PyClassInitializer<Self>> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        if shared.get().closed() {
            return Err(hook_error(
                shared.py(),
                "this plan was closed, or the model that it was prepared for no longer exists: \
                 prepare it again",
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
        let frame = PyClassInitializer::from(Frame::sharing(shared.unbind()));
        Ok(frame.add_subclass(TokenTracker).add_subclass(request))
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
        // Releases last: removed hooks do not count the calls that the warning is about.
        let (frame, py) = (slf.as_super().as_super(), slf.py());
        let releases = frame.get().take_releases();
        let left = Frame::leave(frame);
        let warned = match error {
            None if left.is_ok() => Self::warn_of_silence(slf),
            _ => Ok(()),
        };
        frame.get().put_releases(py, releases)?;
        left.and(warned)
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

    /// Sets the numbers of tokens of its prompts.
    fn set_prompt_lengths(slf: &Bound<'_, Self>, lengths: Vec<i64>) {
        Membership::set_prompts(slf.as_super().as_super().get(), lengths.into());
    }

    /// Numbers of tokens of its prompts, as passed when it was opened or by its last batch with
    /// `lengths` for it; empty if unknown.
    #[getter]
    fn prompt_lengths(slf: &Bound<'_, Self>) -> Vec<i64> {
        Membership::prompts(slf.as_super().as_super().get()).to_vec()
    }

    // No `__clear__`: collectors have one.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.plan)?;
        visit.call(&self.templates)?;
        let mut collectors = self.collectors.iter().filter_map(OnceLock::get);
        collectors.try_for_each(|collector| visit.call(collector))
    }
}

/// A value that a recorder stored.
pub struct Stored<'py> {
    pub collector: Bound<'py, Collector>,
    pub keep: Keep,
    /// Tokens that were taken of it; None for all.
    pub mask: Option<Arc<Mask>>,
}

/// Collector of a capture; for a capture of a plan, the template of its requests' collectors.
pub struct Source {
    pub collector: Py<Collector>,
    pub place: CapturePlace,
}

/// Collector and token source of a recorder.
#[derive(FromPyObject, Default)]
pub struct CapturePlace {
    /// Index among the captures of a plan; None for a capture outside of plans.
    pub capture: Option<usize>,
    /// Index of the captured positions; None for all tokens.
    mask: Option<usize>,
    /// Knows the positions, for a capture outside of plans.
    tracker: Option<Py<TokenTracker>>,
}

impl Source {
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
        let collector = self.of_owner(py, owner)?;
        let (mask, positions) = if let Some(at) = self.place.mask {
            let tracker = self.tracker(py, owner)?;
            let own = tokens.and_then(|it| it.own.as_ref());
            let Some(mask) = TokenTracker::chosen(tracker, at, own)? else {
                return Ok(None);
            };
            let positions = match positions {
                Some(all) => all.at(&mask.places(py)?, 0),
                None if collector.get().joins() => TokenTracker::positions_at(tracker, at)?,
                None => None,
            };
            (Some(mask), positions)
        } else {
            (None, positions.and_then(TokenPositions::of_whole))
        };
        if positions.as_ref().is_some_and(|it| !it.has_tokens()) {
            return Ok(None);
        }
        let taken = mask.as_ref().map(|mask| {
            let arguments = turn.map(CallArguments::of);
            keeping::taken(&collector, index, mask, value, arguments)
        });
        let taken = taken.transpose()?;
        let value = taken.as_ref().unwrap_or(value);
        let keep = keeping::record(&collector, index, value, positions, shared)?;
        Ok(Some(Stored {
            collector,
            keep,
            mask,
        }))
    }

    /// Returns the collector of an owner.
    pub fn of_owner<'py>(
        &self,
        py: Python<'py>,
        owner: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Collector>> {
        let Some(capture) = self.place.capture else {
            return Ok(self.collector.bind(py).clone());
        };
        let none = || PyRuntimeError::new_err("a capture of a plan can fire only for a request");
        let request = owner.ok_or_else(none)?.cast::<RequestBase>()?;
        request.get().collector(py, capture)
    }

    fn tracker<'a, 'py>(
        &'a self,
        py: Python<'py>,
        owner: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<&'a Bound<'py, TokenTracker>> {
        TokenTracker::of(py, self.place.tracker.as_ref(), owner)
    }

    /// Returns the captured places among the rows of a member; None if they are not known.
    pub fn places(&self, owner: &Bound<'_, PyAny>) -> PyResult<Option<Places>> {
        let Some(at) = self.place.mask else {
            return Ok(Some(None));
        };
        let places = TokenTracker::places(self.tracker(owner.py(), Some(owner))?, at);
        Ok(places.map(|places| Some((at, places))))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.collector)?;
        visit.call(&self.place.tracker)
    }
}
