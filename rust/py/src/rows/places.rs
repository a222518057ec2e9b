//! Places in a batch, one type for each kind.
//!
//! | type | a number of |
//! | --- | --- |
//! | [`BatchRow`] | the rows of the batch |
//! | [`MemberPlace`] | the rows of one member in the batch |
//! | [`TokenPlace`] | the tokens of one member in the tensors of a module |
//! | [`Position`] | the tokens of a request, those of earlier steps included |
//!
//! `Rows` are those of a tensor.

use std::sync::Arc;

use crate::hooks::native::Turn;

/// Row of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BatchRow(pub usize);

/// Place of a row among those of its member in the batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemberPlace(pub usize);

/// Place of a token among those of its member in the tensors of a module: of one of its rows there,
/// or of a column of its padded row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenPlace(pub usize);

/// Position of a token in its request; negative for padding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Position(pub i64);

impl Position {
    /// That of a row that is nobody's.
    pub const NOBODY: Self = Self(-1);
}

/// Rows of a member in the tensors of a module that has rows of its own.
#[derive(Clone)]
pub struct OwnRows {
    /// Place in the batch of each.
    pub places: Arc<[MemberPlace]>,
    /// Their dimension.
    pub dim: usize,
}

impl OwnRows {
    /// Returns those that are among some of the member's rows of the batch.
    pub fn among(&self, of_batch: &[MemberPlace]) -> Vec<TokenPlace> {
        let places = self.places.iter().enumerate();
        let chosen = places.filter(|(_, place)| of_batch.contains(place));
        chosen.map(|(own, _)| TokenPlace(own)).collect()
    }
}

/// Returns the places of a member's rows in tensors whose rows are those of the batch.
pub fn in_tensors(of_batch: &[MemberPlace]) -> Vec<TokenPlace> {
    of_batch.iter().map(|place| TokenPlace(place.0)).collect()
}

/// Positions of the tokens of a member in the tensors of a module.
#[derive(Clone)]
pub struct TokenPositions {
    /// By place.
    pub values: Arc<[Position]>,
    /// Dimension whose rows are the tokens; None for a padded row, the tokens of which are columns.
    pub dim: Option<usize>,
}

impl TokenPositions {
    /// Those of the tokens at these places, along a dimension; None if one is out of range.
    pub fn at(&self, places: &[TokenPlace], dim: Option<usize>) -> Option<Self> {
        let chosen = places.iter().map(|place| self.values.get(place.0).copied());
        let values = chosen.collect::<Option<_>>()?;
        Some(Self { values, dim })
    }

    /// Those of a member's rows in the tensors of a module that has rows of its own. `self`: those
    /// in tensors whose rows are the batch's.
    pub fn of_own(&self, own: &OwnRows) -> Option<Self> {
        self.at(&in_tensors(&own.places), Some(own.dim))
    }
}

/// Tokens of a member of a batch in a value.
pub struct Tokens {
    /// None if they are not known.
    pub positions: Option<TokenPositions>,
    /// None if its rows are those of the batch.
    pub own: Option<OwnRows>,
}

impl Tokens {
    /// Returns those of a turn, if that is of a member of a batch.
    pub fn of<'a>(turn: &Turn<'a, '_>) -> Option<&'a Self> {
        turn.part?.downcast_ref()
    }
}
