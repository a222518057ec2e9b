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
use crate::rows::places::{MemberPlace, OwnRows, Position, TokenPlace, TokenPositions, in_tensors};

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

    /// Calls the function with the positions of rows of one length; returns places, row after row.
    fn chosen_by_function(
        &self,
        py: Python<'_>,
        rows: &[&[Position]],
        lengths: &[i64],
    ) -> PyResult<Vec<usize>> {
        let count = rows.iter().map(|row| row.len()).sum();
        let positions = rows
            .iter()
            .map(|row| row.iter().map(|it| it.0).collect::<Vec<_>>());
        let positions: Vec<_> = positions.collect();
        let places = self.given.bind(py).call1((positions, lengths))?;
        let places: Vec<usize> = places.extract()?;
        if places.iter().any(|place| *place >= count) {
            let message = "a place is out of range of the rows";
            return Err(PyValueError::new_err(message));
        }
        Ok(places)
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

    /// Returns the places of the tokens that are at them. `prompt`: length of the prompt, see `check`.
    pub fn places(
        &self,
        py: Python<'_>,
        positions: &[Position],
        prompt: Option<i64>,
    ) -> PyResult<Vec<MemberPlace>> {
        let Some(test) = self.test(prompt) else {
            let length = prompt.unwrap_or_default();
            let places = self.chosen_by_function(py, &[positions], &[length])?;
            return Ok(places.into_iter().map(MemberPlace).collect());
        };
        let places = positions.iter().enumerate();
        let places = places.filter(|(_, position)| test(**position));
        Ok(places.map(|(place, _)| MemberPlace(place)).collect())
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
    let places = at.places(py, &positions, prompt_length)?;
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
    /// Rows of a batch.
    Rows(PlacesOfRows),
    /// Tokens of padded rows of a batch.
    Padded(PlacesOfTokens),
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

/// Places of tokens among a member's rows of the batch, for each of the positions of its plan.
pub struct PlacesOfRows {
    places: Box<[Vec<MemberPlace>]>,
    /// Number of the member's rows, and their dimension.
    count: usize,
    dim: usize,
    /// Length of the member's prompt; None if it is not known.
    prompt: Option<i64>,
    /// Each made when it is first needed.
    masks: Box<[OnceLock<Arc<Mask>>]>,
}

/// Places of tokens in a member's padded rows, for each of the positions of its plan.
pub struct PlacesOfTokens {
    places: Box<[Vec<TokenPlace>]>,
    /// Number of rows, and of columns.
    shape: [usize; 2],
    /// Length of each row's prompt, or of all; none if they are not known.
    prompts: Arc<[i64]>,
    /// Each made when it is first needed.
    masks: Box<[OnceLock<Arc<Mask>>]>,
}

/// Tokens at one of the positions of a plan.
#[derive(Clone)]
pub enum Chosen {
    Nothing,
    At(Arc<Mask>),
}

impl Masks {
    /// Finds the tokens of a member whose rows are single tokens. Raises if a function does.
    pub fn of_rows(
        py: Python<'_>,
        ats: &PlanPositions,
        positions: &[Position],
        prompt: Option<i64>,
        dim: usize,
    ) -> PyResult<Self> {
        let PlanPositions(ats) = ats;
        let places = ats.iter().map(|at| at.places(py, positions, prompt));
        Ok(Self::Rows(PlacesOfRows {
            places: places.collect::<PyResult<_>>()?,
            count: positions.len(),
            dim,
            prompt,
            masks: ats.iter().map(|_| OnceLock::new()).collect(),
        }))
    }

    /// Finds the tokens of a member whose rows are padded. Raises if a function does.
    pub fn of_padded(
        py: Python<'_>,
        ats: &PlanPositions,
        positions: &[Position],
        columns: usize,
        prompts: Arc<[i64]>,
    ) -> PyResult<Self> {
        let PlanPositions(ats) = ats;
        let rows = positions.len() / columns;
        let of_all = |at: &At| {
            if matches!(at.kind, PositionsKind::Function) {
                let of_rows: Vec<_> = positions.chunks(columns).collect();
                let length = |row| prompts.get(row).or(prompts.first()).copied();
                let lengths: Vec<_> = (0..rows)
                    .map(|row| length(row).unwrap_or_default())
                    .collect();
                let places = at.chosen_by_function(py, &of_rows, &lengths)?;
                return Ok(places.into_iter().map(TokenPlace).collect());
            }
            let mut all = Vec::new();
            for (row, positions) in positions.chunks(columns).enumerate() {
                let prompt = prompts.get(row).or_else(|| prompts.first());
                let places = at.places(py, positions, prompt.copied())?;
                all.extend(places.iter().map(|it| TokenPlace(row * columns + it.0)));
            }
            Ok(all)
        };
        Ok(Self::Padded(PlacesOfTokens {
            places: ats.iter().map(of_all).collect::<PyResult<_>>()?,
            shape: [rows, columns],
            masks: ats.iter().map(|_| OnceLock::new()).collect(),
            prompts,
        }))
    }

    /// Returns those at one of the positions; `own`: the rows of the value, where they are not those
    /// of the batch.
    pub fn chosen(&self, py: Python<'_>, at: usize, own: Option<&OwnRows>) -> PyResult<Chosen> {
        let of_batch = match self {
            Self::Tokens(tokens) => tokens.chosen[at].clone(),
            Self::Padded(tokens) => tokens.chosen(py, at)?,
            Self::Rows(rows) => {
                let mask = rows.mask(py, at, own)?;
                return Ok(mask.map_or(Chosen::Nothing, Chosen::At));
            }
        };
        let (Chosen::At(mask), Some(own)) = (&of_batch, own) else {
            return Ok(of_batch);
        };
        let own = match own {
            OwnRows::Gathered { dim: 1.., .. } => return Err(hook_type_error(py, NOT_AHEAD)),
            OwnRows::Gathered { places, .. } => mask.at(py, places)?,
            OwnRows::Matrix => Some(mask.flat(py)?),
        };
        Ok(own.map_or(Chosen::Nothing, |own| Chosen::At(Arc::new(own))))
    }

    /// Returns the positions of a call's tokens that are at one of the positions; None for a member of a
    /// batch.
    pub fn positions(&self, py: Python<'_>, at: usize) -> PyResult<Option<TokenPositions>> {
        match self {
            Self::Tokens(tokens) => tokens.positions(py, at),
            Self::Rows(_) | Self::Padded(_) => Ok(None),
        }
    }

    /// Returns those at one of the positions as places among the member's tokens; `own`: see `chosen`.
    pub fn token_places(
        &self,
        py: Python<'_>,
        at: usize,
        own: Option<&OwnRows>,
    ) -> PyResult<Vec<TokenPlace>> {
        match (self, own) {
            (Self::Rows(rows), Some(own)) => Ok(own.among(&rows.places[at])),
            (Self::Rows(rows), None) => Ok(in_tensors(&rows.places[at])),
            (Self::Padded(tokens), None | Some(OwnRows::Matrix)) => Ok(tokens.places[at].clone()),
            _ => match self.chosen(py, at, own)? {
                Chosen::Nothing => Ok(Vec::new()),
                Chosen::At(mask) => mask.places(py),
            },
        }
    }

    /// Returns the length of each row's prompt; None if they are not known.
    pub fn prompts(&self, py: Python<'_>) -> PyResult<Option<Arc<[i64]>>> {
        match self {
            Self::Tokens(tokens) => tokens.prompts(py),
            Self::Rows(rows) => Ok(rows.prompt.map(|prompt| Arc::from([prompt]))),
            Self::Padded(tokens) => {
                let prompts = &tokens.prompts;
                Ok((!prompts.is_empty()).then(|| Arc::clone(prompts)))
            }
        }
    }

    /// Returns those at one of the positions as places among the rows of the batch; None if they are
    /// not known as such.
    pub fn places(&self, at: usize) -> Option<&[MemberPlace]> {
        match self {
            Self::Rows(rows) => Some(&rows.places[at]),
            Self::Tokens(_) | Self::Padded(_) => None,
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
        let (Some((positions, sequences)), Chosen::At(mask)) = (&self.call, &self.chosen[at])
        else {
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

impl PlacesOfRows {
    /// Returns the mask of one of the positions; None if no token is at it.
    fn mask(
        &self,
        py: Python<'_>,
        at: usize,
        own: Option<&OwnRows>,
    ) -> PyResult<Option<Arc<Mask>>> {
        let places = &self.places[at];
        if let Some(own) = own {
            let (count, dim) = match own {
                OwnRows::Gathered { places, dim } => (places.len(), *dim),
                OwnRows::Matrix => (self.count, 0),
            };
            let places = own.among(places);
            let shape = of_dim(count, dim);
            let mask = (!places.is_empty()).then(|| Mask::of_places(py, &places, &shape));
            return Ok(mask.transpose()?.map(Arc::new));
        }
        if places.is_empty() {
            return Ok(None);
        }
        if let Some(mask) = self.masks[at].get() {
            return Ok(Some(Arc::clone(mask)));
        }
        let shape = of_dim(self.count, self.dim);
        let mask = Mask::of_places(py, &in_tensors(places), &shape)?;
        let mask = self.masks[at].get_or_init(|| Arc::new(mask));
        Ok(Some(Arc::clone(mask)))
    }
}

/// Shape of a mask of the rows in a dimension.
fn of_dim(count: usize, dim: usize) -> Vec<usize> {
    std::iter::repeat_n(1, dim).chain([count]).collect()
}

impl PlacesOfTokens {
    fn chosen(&self, py: Python<'_>, at: usize) -> PyResult<Chosen> {
        let places = &self.places[at];
        if places.is_empty() {
            return Ok(Chosen::Nothing);
        }
        if let Some(mask) = self.masks[at].get() {
            return Ok(Chosen::At(Arc::clone(mask)));
        }
        let mask = Mask::of_places(py, places, &self.shape)?;
        let mask = self.masks[at].get_or_init(|| Arc::new(mask));
        Ok(Chosen::At(Arc::clone(mask)))
    }
}
