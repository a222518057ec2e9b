//! `TokenTracker`: the frame that knows which tokens the running calls of a model have.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::contexts::frame::Frame;
use crate::error::hook_error;
use crate::rows::at::{Chosen, Masks, MasksOfTokens};
use crate::rows::call_tokens::CallTokens;
use crate::rows::mask::Mask;
use crate::rows::membership::{MemberCall, Membership};
use crate::rows::places::{
    MemberPlace, OF_REQUEST, OwnRows, TokenPlace, TokenPositions, Tokens, shared_row,
};

/// Frame that knows the tokens at some positions in the running calls of a model: a request of a
/// plan, or the tracker of a hook or a capture with positions, which is never entered.
#[pyclass(frozen, subclass, extends = Frame, module = "ferrohook._core")]
pub struct TokenTracker;

#[pymethods]
impl TokenTracker {
    #[new]
    #[pyo3(signature = (*_others))]
    fn new(_others: &Bound<'_, PyTuple>) -> (Self, Frame) {
        (Self, Frame::default())
    }

    /// Sets the tokens at each of the positions, tensors of bools. In the calls of a batch; or, with
    /// the `tokens` of a call, in the call that starts on this thread.
    ///
    /// `positions`: of the tokens of a call, (batch, length); `sequences`: id of their sequences;
    /// `lengths`: of the prompt of each row, if they are known.
    #[pyo3(signature = (masks, tokens = None, positions = None, sequences = OF_REQUEST, lengths = None))]
    fn set_masks(
        slf: &Bound<'_, Self>,
        masks: &Bound<'_, PyTuple>,
        tokens: Option<Py<PyAny>>,
        positions: Option<Py<PyAny>>,
        sequences: u64,
        lengths: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let chosen = |mask: Bound<'_, PyAny>| Ok(Mask::of_any(&mask)?.map(Arc::new));
        let chosen = masks.iter().map(chosen).collect::<PyResult<_>>()?;
        let call = positions.map(|positions| (positions, sequences));
        let masks = Masks::Tokens(MasksOfTokens::new(chosen, call, lengths));
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

    /// Gives the call that starts on this thread the tokens of the call around it.
    fn inherit_tokens(slf: &Bound<'_, Self>) {
        let frame = slf.as_super().get();
        if let Some(call) = Membership::around(slf.py(), frame) {
            Membership::set_call(frame, call);
        }
    }
}

/// Tokens of a call at some positions.
pub struct TokensAt {
    pub tokens: CallTokens,
    /// Their places among the tokens of the member of a batch; None outside of batches.
    pub places: Option<Vec<TokenPlace>>,
}

impl TokenTracker {
    /// Returns the tracker of a hook: its own, or else the request that it fires for.
    pub fn of<'a, 'py>(
        py: Python<'py>,
        own: Option<&'a Py<Self>>,
        owner: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<&'a Bound<'py, Self>> {
        if let Some(own) = own {
            return Ok(own.bind(py));
        }
        let none = || PyRuntimeError::new_err("a hook of a plan can fire only for a request");
        Ok(owner.ok_or_else(none)?.cast()?)
    }

    /// Returns the tokens at one of the positions; `own`: the rows of the value, where they differ
    /// from the rows of the batch.
    pub fn chosen(slf: &Bound<'_, Self>, at: usize, own: Option<&OwnRows>) -> PyResult<Chosen> {
        Self::masks(slf)?.chosen(slf.py(), at, own)
    }

    fn masks(slf: &Bound<'_, Self>) -> PyResult<Arc<Masks>> {
        Membership::masks(slf.as_super().get()).ok_or_else(|| {
            let message = "the positions of this call are not known: call the model that at= was \
                           given for, not a part of it";
            hook_error(slf.py(), message)
        })
    }

    /// Returns the positions of the running call's tokens that are at one of the positions.
    pub fn positions_at(slf: &Bound<'_, Self>, at: usize) -> PyResult<Option<TokenPositions>> {
        let masks = Membership::masks(slf.as_super().get());
        masks.map_or(Ok(None), |masks| masks.positions(slf.py(), at))
    }

    /// Returns the tokens at one of the positions, with their positions; None if there are none.
    /// `tokens`: of a member of a batch; `describe`: describes the hook, for errors.
    pub fn tokens_at(
        slf: &Bound<'_, Self>,
        at: usize,
        tokens: Option<&Tokens>,
        describe: &dyn Fn() -> String,
    ) -> PyResult<Option<TokensAt>> {
        let py = slf.py();
        let (places, positions) = if let Some(tokens) = tokens
            && let Some(all) = &tokens.positions
        {
            let places = Self::masks(slf)?.token_places(py, at, tokens.own.as_ref())?;
            let positions = all.at(&places, 0);
            (Some(places), positions)
        } else {
            if Self::chosen(slf, at, None)?.is_none() {
                return Ok(None);
            }
            (None, Self::positions_at(slf, at)?)
        };
        let Some(positions) = positions else {
            let message = format!("{}: the positions of its tokens are not known", describe());
            return Err(hook_error(py, message));
        };
        if positions.values.is_empty() {
            return Ok(None);
        }
        if let Some(position) = positions.repeated() {
            return Err(hook_error(py, shared_row(&describe(), position)));
        }
        let tokens = CallTokens::of(&positions, Self::prompts(slf)?);
        Ok(Some(TokensAt { tokens, places }))
    }

    /// Returns the length of the prompt of each row of the running call; None if they are not known.
    fn prompts(slf: &Bound<'_, Self>) -> PyResult<Option<Arc<[i64]>>> {
        let frame = slf.as_super().get();
        if let Some(masks) = Membership::masks(frame)
            && let Some(prompts) = masks.prompts(slf.py())?
        {
            return Ok(Some(prompts));
        }
        let prompts = Membership::prompts(frame);
        Ok((!prompts.is_empty()).then_some(prompts))
    }

    /// Returns one of the positions as places among the rows of the batch; None if they are not
    /// known as such.
    pub fn places(slf: &Bound<'_, Self>, at: usize) -> Option<Vec<MemberPlace>> {
        Membership::masks(slf.as_super().get())?.rows(at)
    }
}
