//! Positions that plans name, and the tokens of a request that are at them.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PySlice, PyString};

use crate::contexts::frame::Frame;
use crate::contexts::slot::FrameSlot;
use crate::error::{hook_type_error, rows_error};
use crate::rows::mask::Mask;
use crate::rows::places::{MemberPlace, OwnRows, Position, TokenPlace, TokenPositions};

const NOT_AHEAD: &str = "the rows of the module, see `gathered`, are not in the first dimension of its \
                         tensors, so that the tokens at positions are not known there: leave out at=";

/// Positions in a request, as `At` of Python: a name, an int, a slice, or a function that gets the
/// positions of rows of tokens and the lengths of their prompts, and returns the places of the chosen
/// ones.
pub struct At {
    given: Py<PyAny>,
    kind: PositionsKind,
}

enum PositionsKind {
    Prompt,
    LastPrompt,
    Generated,
    One(i64),
    Slice {
        start: Option<i64>,
        stop: Option<i64>,
        step: i64,
    },
    Function,
}

impl<'py> FromPyObject<'_, 'py> for At {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = given.py();
        let kind = if let Ok(name) = given.cast::<PyString>() {
            match name.to_str()? {
                "prompt" => PositionsKind::Prompt,
                "last_prompt" => PositionsKind::LastPrompt,
                _ => PositionsKind::Generated,
            }
        } else if given.is_instance_of::<PyInt>() {
            PositionsKind::One(saturating(&given)?)
        } else if let Ok(slice) = given.cast::<PySlice>() {
            let bound = |name: &Bound<'py, PyString>| {
                let bound = slice.getattr(name)?;
                let bound = (!bound.is_none()).then_some(bound);
                bound.map(|it| saturating(&it)).transpose()
            };
            PositionsKind::Slice {
                start: bound(intern!(py, "start"))?,
                stop: bound(intern!(py, "stop"))?,
                step: bound(intern!(py, "step"))?.unwrap_or(1),
            }
        } else {
            PositionsKind::Function
        };
        let given = given.to_owned().unbind();
        Ok(Self { given, kind })
    }
}

/// Reads an int; one that is out of range is after all positions, or before them.
fn saturating(int: &Bound<'_, PyAny>) -> PyResult<i64> {
    int.extract().or_else(|error: PyErr| {
        if !error.is_instance_of::<PyOverflowError>(int.py()) {
            return Err(error);
        }
        Ok(if int.gt(0)? { i64::MAX } else { i64::MIN })
    })
}

impl At {
    /// True if they refer to the length of the prompt.
    pub fn needs_prompt(&self) -> bool {
        match self.kind {
            PositionsKind::Prompt | PositionsKind::LastPrompt | PositionsKind::Generated => true,
            PositionsKind::One(position) => position < 0,
            PositionsKind::Slice { start, stop, .. } => {
                [start, stop].into_iter().flatten().any(|it| it < 0)
            }
            PositionsKind::Function => false,
        }
    }

    /// Raises if they refer to the length of a prompt that is not known.
    pub fn check(&self, py: Python<'_>, prompt: Option<i64>) -> PyResult<()> {
        if prompt.is_none() && self.needs_prompt() {
            let at = self.given.bind(py).repr()?;
            let message =
                format!("positions {at} need the length of the request's prompt: pass lengths");
            return Err(rows_error(py, message));
        }
        Ok(())
    }

    /// Returns the test of a position; None for a function, which is called once for all. `prompt`:
    /// length of the prompt, see `check`.
    pub fn test(&self, prompt: Option<i64>) -> Option<Box<dyn Fn(Position) -> bool>> {
        let length = prompt.unwrap_or_default();
        let from_end = |bound: i64| match bound {
            0.. => bound,
            _ => length.saturating_add(bound).max(0),
        };
        let chosen: Box<dyn Fn(i64) -> bool> = match self.kind {
            PositionsKind::Prompt => Box::new(move |it| it < length),
            PositionsKind::LastPrompt => Box::new(move |it| it == length - 1),
            PositionsKind::Generated => Box::new(move |it| it >= length),
            PositionsKind::One(one) if one >= 0 => Box::new(move |it| it == one),
            PositionsKind::One(one) => Box::new(move |it| it == length.saturating_add(one)),
            PositionsKind::Slice { start, stop, step } => {
                let (start, stop) = (start.map_or(0, from_end), stop.map(from_end));
                Box::new(move |it| {
                    it >= start && stop.is_none_or(|stop| it < stop) && (it - start) % step == 0
                })
            }
            PositionsKind::Function => return None,
        };
        Some(Box::new(move |position| {
            position.0 >= 0 && chosen(position.0)
        }))
    }

    /// Returns the places of the tokens that are at them, row after row. `positions`: of rows of one
    /// `width`, one after the other; `prompts`: length of each row's prompt, or of all, see `check`. A
    /// function is called once, with the positions of all rows and the lengths of their prompts.
    pub fn places(
        &self,
        py: Python<'_>,
        positions: &[Position],
        width: usize,
        prompts: &[i64],
    ) -> PyResult<Vec<TokenPlace>> {
        let prompt = |row: usize| prompts.get(row).or(prompts.first()).copied();
        let rows = || positions.chunks(width.max(1)).enumerate();
        let mut all = Vec::new();
        for (row, own) in rows() {
            let Some(test) = self.test(prompt(row)) else {
                let of_row = |(_, row): (_, &[Position])| row.iter().map(|it| it.0).collect();
                let lengths = rows().map(|(row, _)| prompt(row).unwrap_or_default());
                let arguments: (Vec<Vec<_>>, Vec<_>) =
                    (rows().map(of_row).collect(), lengths.collect());
                let places: Vec<usize> = self.given.bind(py).call1(arguments)?.extract()?;
                if places.iter().any(|place| *place >= positions.len()) {
                    let message = "a place is out of range of the rows";
                    return Err(PyValueError::new_err(message));
                }
                return Ok(places.into_iter().map(TokenPlace).collect());
            };
            let chosen = own.iter().enumerate().filter(|(_, it)| test(**it));
            all.extend(chosen.map(|(column, _)| TokenPlace(row * width + column)));
        }
        Ok(all)
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.given)
    }
}

/// True if positions refer to the length of the prompt.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what pyo3 extracts is owned")]
pub fn needs_prompt(at: At) -> bool {
    at.needs_prompt()
}

/// Returns which of a request's tokens are at some positions: places among those whose positions are
/// given.
///
/// Raises:
///     RowsError: the length of its prompt is needed and not known.
#[pyfunction]
#[pyo3(signature = (at, positions, prompt_length))]
pub fn places_at(
    py: Python<'_>,
    at: At,
    positions: Vec<i64>,
    prompt_length: Option<i64>,
) -> PyResult<Vec<usize>> {
    at.check(py, prompt_length)?;
    let positions: Vec<_> = positions.into_iter().map(Position).collect();
    let places = at.places(py, &positions, positions.len(), prompt_length.as_slice())?;
    Ok(places.into_iter().map(|place| place.0).collect())
}

/// Positions that a prepared plan names. Kept with its frame, which requests share.
pub struct PlanPositions(Box<[At]>);

impl PlanPositions {
    /// Returns the positions that a member's plan names; None if it names none.
    pub fn of(member: &Frame) -> Option<&Self> {
        let slot: &dyn Any = member.shared_slot()?;
        slot.downcast_ref()
    }

    /// Raises if one refers to the length of a prompt that is not known.
    pub fn check(&self, py: Python<'_>, prompt: Option<i64>) -> PyResult<()> {
        self.0.iter().try_for_each(|at| at.check(py, prompt))
    }
}

impl FrameSlot for PlanPositions {
    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().try_for_each(|at| at.traverse(visit))
    }
}

/// Keeps the positions that a plan names with its frame, once.
#[pyfunction]
pub fn name_positions(frame: &Bound<'_, Frame>, ats: Vec<At>) {
    frame
        .get()
        .slot_or(|| Box::new(PlanPositions(ats.into_boxed_slice())));
}

/// Tokens at the positions of a plan, in the running forward.
pub enum Masks {
    /// Masks of (batch, length).
    Tokens(MasksOfTokens),
    /// Tokens of a member of a batch.
    Member(PlacesOfMember),
}

/// Masks of tokens, for each of the positions of a plan.
pub struct MasksOfTokens {
    chosen: Box<[Chosen]>,
    /// Tensor with the length of each row's prompt; None if they are not known.
    lengths: Option<Py<PyAny>>,
    /// The same on the host, once it has waited for a GPU.
    prompts: OnceLock<Arc<[i64]>>,
    /// Positions of a call's tokens, and the id of their sequences; None for a member of a batch, which
    /// has others for each module.
    call: Option<(Py<PyAny>, u64)>,
    /// The call's tokens at each of the positions, found when they are first needed.
    found: Box<[OnceLock<TokenPositions>]>,
}

/// Places of a member's tokens in its rows of the batch, for each of the positions of its plan.
pub struct PlacesOfMember {
    places: Box<[Vec<TokenPlace>]>,
    /// Positions of its tokens: of its first row, then of the next.
    positions: Arc<[Position]>,
    /// Number of columns of padded rows; None if each row is one token.
    columns: Option<usize>,
    /// Shape of their masks: (1, ..., rows), or that of padded rows.
    shape: Vec<usize>,
    /// Length of each row's prompt, or of all; none if they are not known.
    prompts: Arc<[i64]>,
    /// Each made when it is first needed.
    masks: Box<[OnceLock<Arc<Mask>>]>,
}

/// Tokens at one of the positions of a plan; None if there are none.
pub type Chosen = Option<Arc<Mask>>;

impl Masks {
    /// Finds the tokens of a member: its rows along a dimension, or padded rows of so many columns.
    /// `prompts`: length of each row's prompt, or of all. Raises if a function does.
    pub fn of_member(
        py: Python<'_>,
        PlanPositions(ats): &PlanPositions,
        positions: Arc<[Position]>,
        columns: Option<usize>,
        prompts: Arc<[i64]>,
        dim: usize,
    ) -> PyResult<Self> {
        let width = columns.map_or(positions.len(), |columns| columns.max(1));
        let places = ats
            .iter()
            .map(|at| at.places(py, &positions, width, &prompts));
        Ok(Self::Member(PlacesOfMember {
            places: places.collect::<PyResult<_>>()?,
            shape: match columns {
                Some(_) => vec![positions.len() / width, width],
                None => of_dim(positions.len(), dim),
            },
            positions,
            columns,
            masks: ats.iter().map(|_| OnceLock::new()).collect(),
            prompts,
        }))
    }

    /// Returns the positions of a member's tokens, and the number of columns of padded rows.
    pub fn of_tokens(&self) -> Option<(Arc<[Position]>, Option<usize>)> {
        match self {
            Self::Tokens(_) => None,
            Self::Member(member) => Some((Arc::clone(&member.positions), member.columns)),
        }
    }

    /// Returns those at one of the positions; `own`: the rows of the value, where they are not those
    /// of the batch.
    pub fn chosen(&self, py: Python<'_>, at: usize, own: Option<&OwnRows>) -> PyResult<Chosen> {
        let of_batch = match self {
            Self::Tokens(tokens) => tokens.chosen[at].clone(),
            Self::Member(member) => {
                if let Some(own @ OwnRows::Gathered { places, dim }) = own
                    && let Some(rows) = member.rows(at)
                {
                    let (chosen, shape) = (own.among(&rows), of_dim(places.len(), *dim));
                    let mask = (!chosen.is_empty()).then(|| Mask::of_places(py, &chosen, &shape));
                    return Ok(mask.transpose()?.map(Arc::new));
                }
                member.mask(py, at)?
            }
        };
        let (Some(mask), Some(own)) = (&of_batch, own) else {
            return Ok(of_batch);
        };
        let own = match own {
            OwnRows::Gathered { dim: 1.., .. } => return Err(hook_type_error(py, NOT_AHEAD)),
            OwnRows::Gathered { places, .. } => mask.at(py, places)?,
            OwnRows::Matrix => Some(mask.flat(py)?),
        };
        Ok(own.map(Arc::new))
    }

    /// Returns the positions of a call's tokens that are at one of the positions; None for a member of a
    /// batch.
    pub fn positions(&self, py: Python<'_>, at: usize) -> PyResult<Option<TokenPositions>> {
        match self {
            Self::Tokens(tokens) => tokens.positions(py, at),
            Self::Member(_) => Ok(None),
        }
    }

    /// Returns those at one of the positions as places among the member's tokens; `own`: see `chosen`.
    pub fn token_places(
        &self,
        py: Python<'_>,
        at: usize,
        own: Option<&OwnRows>,
    ) -> PyResult<Vec<TokenPlace>> {
        if let Self::Member(member) = self {
            match own {
                None | Some(OwnRows::Matrix) => return Ok(member.places[at].clone()),
                Some(own) => {
                    if let Some(rows) = member.rows(at) {
                        return Ok(own.among(&rows));
                    }
                }
            }
        }
        let mask = self.chosen(py, at, own)?;
        mask.map_or(Ok(Vec::new()), |mask| mask.places(py))
    }

    /// Returns the length of each row's prompt; None if they are not known.
    pub fn prompts(&self, py: Python<'_>) -> PyResult<Option<Arc<[i64]>>> {
        match self {
            Self::Tokens(tokens) => tokens.prompts(py),
            Self::Member(member) => {
                let prompts = &member.prompts;
                Ok((!prompts.is_empty()).then(|| Arc::clone(prompts)))
            }
        }
    }

    /// Returns those at one of the positions as places among the rows of the batch; None if they are
    /// not known as such.
    pub fn rows(&self, at: usize) -> Option<Vec<MemberPlace>> {
        match self {
            Self::Tokens(_) => None,
            Self::Member(member) => member.rows(at),
        }
    }
}

impl MasksOfTokens {
    /// `call`: positions of the tokens of a call, and the id of their sequences; `lengths`: tensor with
    /// the length of each row's prompt.
    pub fn new(
        chosen: Box<[Chosen]>,
        call: Option<(Py<PyAny>, u64)>,
        lengths: Option<Py<PyAny>>,
    ) -> Self {
        Self {
            found: chosen.iter().map(|_| OnceLock::new()).collect(),
            chosen,
            lengths,
            prompts: OnceLock::new(),
            call,
        }
    }

    fn prompts(&self, py: Python<'_>) -> PyResult<Option<Arc<[i64]>>> {
        let Some(lengths) = &self.lengths else {
            return Ok(None);
        };
        if self.prompts.get().is_none() {
            // Not in `get_or_init`: the method runs Python.
            let lengths = lengths.bind(py).call_method0(intern!(py, "tolist"))?;
            let _ = self.prompts.set(lengths.extract::<Vec<i64>>()?.into());
        }
        Ok(self.prompts.get().cloned())
    }

    /// Returns the positions of the call's tokens at one of the positions, in the order in which a mask
    /// takes them; None if they are unknown, or the call is one of a batch.
    fn positions(&self, py: Python<'_>, at: usize) -> PyResult<Option<TokenPositions>> {
        let (Some((positions, sequences)), Some(mask)) = (&self.call, &self.chosen[at]) else {
            return Ok(None);
        };
        if let Some(found) = self.found[at].get() {
            return Ok(Some(found.clone()));
        }
        let (rows, values) = mask.tokens(positions.bind(py))?;
        let found = TokenPositions {
            rows: Some(rows.into()),
            sequences: *sequences,
            ..TokenPositions::of_rows(values.into_iter().map(Position).collect(), 0)
        };
        Ok(Some(self.found[at].get_or_init(|| found).clone()))
    }
}

impl PlacesOfMember {
    /// Returns those at one of the positions as rows of the member; None for padded rows.
    fn rows(&self, at: usize) -> Option<Vec<MemberPlace>> {
        let places = self.places[at].iter();
        self.columns
            .is_none()
            .then(|| places.map(|place| MemberPlace(place.0)).collect())
    }

    /// Returns the mask of one of the positions.
    fn mask(&self, py: Python<'_>, at: usize) -> PyResult<Chosen> {
        let places = &self.places[at];
        if places.is_empty() {
            return Ok(None);
        }
        if let Some(mask) = self.masks[at].get() {
            return Ok(Some(Arc::clone(mask)));
        }
        let mask = Mask::of_places(py, places, &self.shape)?;
        let mask = self.masks[at].get_or_init(|| Arc::new(mask));
        Ok(Some(Arc::clone(mask)))
    }
}

/// Shape of a mask of the rows in a dimension.
fn of_dim(count: usize, dim: usize) -> Vec<usize> {
    std::iter::repeat_n(1, dim).chain([count]).collect()
}
