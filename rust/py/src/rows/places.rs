//! Places in a batch, one type for each kind.
//!
//! | type | a number of |
//! | --- | --- |
//! | [`BatchRow`] | the rows of the batch |
//! | [`MemberPlace`] | the rows of one member in the batch |
//! | [`TokenPlace`] | the tokens of one member in the tensors of a module |
//! | [`Position`] | the tokens of a request, earlier steps included |
//!
//! `Rows` are rows of a tensor.

use std::sync::Arc;

use crate::hooks::native::Turn;

/// Row of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BatchRow(pub usize);

/// Place of a row among the batch rows of its member.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemberPlace(pub usize);

/// Place of a member's token in the tensors of a module: an index of its rows there, or a column of
/// its padded row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenPlace(pub usize);

/// Row of a token in its request, and its position.
pub type Token = (usize, Position);

/// Position of a token in its request; negative for padding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub i64);

impl Position {
    /// Position of a row without an owner.
    pub const NOBODY: Self = Self(-1);
}

/// Rows of a member in the tensors of a module with its own row layout.
#[derive(Clone)]
pub enum OwnRows {
    Gathered {
        /// Place in the batch of each.
        places: Arc<[MemberPlace]>,
        /// Their dimension.
        dim: usize,
    },
    /// The tokens of its rows, one row after the other.
    Matrix,
}

impl OwnRows {
    /// Returns the places of the member's tokens in `of_batch`, in which each row is a single token.
    pub fn among(&self, of_batch: &[MemberPlace]) -> Vec<TokenPlace> {
        let Self::Gathered { places, .. } = self else {
            return in_tensors(of_batch);
        };
        let places = places.iter().enumerate();
        let chosen = places.filter(|(_, place)| of_batch.contains(place));
        chosen.map(|(own, _)| TokenPlace(own)).collect()
    }
}

/// Returns the places of a member's rows in tensors that have the rows of the batch.
pub fn in_tensors(of_batch: &[MemberPlace]) -> Vec<TokenPlace> {
    of_batch.iter().map(|place| TokenPlace(place.0)).collect()
}

/// Positions of the tokens of a request in the tensors of a module.
#[derive(Clone)]
pub struct TokenPositions {
    /// Positions by place.
    pub values: Arc<[Position]>,
    /// Row in the request of each token; None if the request has one row.
    pub rows: Option<Arc<[usize]>>,
    /// Number in the call of each token, where a module gathers them and one may stand in several
    /// places; None if they are numbered in order.
    pub numbers: Option<Arc<[usize]>>,
    pub dims: TokenDims,
    /// Id of the token sequences, which distinguishes the sequences of one request; see [`OF_REQUEST`].
    pub sequences: u64,
}

/// Dimensions of a tensor that index tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TokenDims {
    /// One, each row of which is a token.
    Rows(usize),
    /// The first two: so many padded rows, and their columns.
    Padded(usize),
}

/// Id of the sequences of a member of batches, all of whose tokens are of the request.
pub const OF_REQUEST: u64 = 0;

impl TokenPositions {
    /// Returns the positions of the tokens at `places`, in a dimension; None if one is out of range.
    pub fn at(&self, places: &[TokenPlace], dim: usize) -> Option<Self> {
        let chosen = places.iter().map(|place| self.values.get(place.0).copied());
        let values = chosen.collect::<Option<_>>()?;
        let rows = self.rows.as_ref();
        let rows = rows.map(|rows| places.iter().map(|place| rows[place.0]).collect());
        let in_order = self.numbers.is_none() && places.is_sorted_by(|one, next| one.0 < next.0);
        let numbers = || places.iter().map(|place| self.number(place.0)).collect();
        Some(Self {
            values,
            rows,
            numbers: (!in_order).then(numbers),
            dims: TokenDims::Rows(dim),
            sequences: self.sequences,
        })
    }

    /// Positions of single tokens along a dimension.
    pub fn of_rows(values: Arc<[Position]>, dim: usize) -> Self {
        Self {
            values,
            rows: None,
            numbers: None,
            dims: TokenDims::Rows(dim),
            sequences: OF_REQUEST,
        }
    }

    /// Positions of padded rows, from the positions of their columns; `places`: the rows' places in
    /// the request.
    pub fn of_padded(positions: &Arc<[Position]>, columns: usize, places: &[MemberPlace]) -> Self {
        let numbers = |place: &MemberPlace| place.0 * columns..(place.0 + 1) * columns;
        let row_of = |place: &MemberPlace| std::iter::repeat_n(place.0, columns);
        let all = places.len() * columns == positions.len();
        let in_order = all && places.iter().enumerate().all(|(at, place)| place.0 == at);
        Self {
            values: if in_order {
                Arc::clone(positions)
            } else {
                let of_row = |place| positions[numbers(place)].iter().copied();
                places.iter().flat_map(of_row).collect()
            },
            rows: (positions.len() > columns).then(|| places.iter().flat_map(row_of).collect()),
            numbers: (!in_order).then(|| places.iter().flat_map(numbers).collect()),
            dims: TokenDims::Padded(places.len()),
            sequences: OF_REQUEST,
        }
    }

    /// Positions of a whole value; None for several padded rows, whose calls are not joined.
    pub fn of_whole(self) -> Option<Self> {
        let several =
            self.rows.is_some() || matches!(self.dims, TokenDims::Padded(rows) if rows != 1);
        (!several).then_some(self)
    }

    /// True if they are of the rows of the first dimension, as they are read.
    pub fn in_order(&self) -> bool {
        self.dims == TokenDims::Rows(0)
            && self
                .tokens()
                .is_sorted_by(|one, next| one.is_some() && one < next)
            && self.tokens().all(|token| token.is_some())
    }

    /// True if one is of a token, not of padding.
    pub fn has_tokens(&self) -> bool {
        self.values.iter().any(|position| position.0 >= 0)
    }

    /// Row and position of each token, None for padding and for one that was run again.
    pub fn tokens(&self) -> impl Iterator<Item = Option<Token>> + '_ {
        let tokens = self.values.iter().enumerate();
        tokens.map(|(place, position)| {
            let row = self.rows.as_ref().map_or(0, |rows| rows[place]);
            (position.0 >= 0).then_some((row, *position))
        })
    }

    /// Returns a position that two tokens of one row have, as texts that share a row; None if all differ.
    pub fn repeated(&self) -> Option<Position> {
        let ascending = self.tokens().flatten().is_sorted_by(|one, next| one < next);
        if ascending {
            return None; // most often
        }
        let numbered = self.tokens().enumerate();
        let mut tokens: Vec<_> = numbered
            .filter_map(|(place, token)| Some((token?, self.number(place))))
            .collect();
        tokens.sort_unstable();
        tokens.dedup(); // one that stands in several places
        let twice = tokens.windows(2).find(|pair| pair[0].0 == pair[1].0);
        twice.map(|pair| pair[0].0.1)
    }

    /// Returns the number in the call of the token at a place.
    fn number(&self, place: usize) -> usize {
        self.numbers
            .as_ref()
            .map_or(place, |numbers| numbers[place])
    }

    /// Returns them without the tokens for which `ran_again` is true.
    pub fn without(&self, ran_again: impl Fn(&Token) -> bool) -> Self {
        let left = self.tokens().map(|token| match token {
            Some(token) if !ran_again(&token) => token.1,
            _ => Position::NOBODY,
        });
        Self {
            values: left.collect(),
            ..self.clone()
        }
    }
}

/// Message of the error for two tokens at one position of a row; `who`: what needs to tell them apart.
pub fn shared_row(who: &str, position: Position) -> String {
    format!(
        "{who} got two tokens at position {} of one row: texts that share a row cannot be told \
         apart. Give each a row",
        position.0
    )
}

/// Tokens of a member of a batch in a value.
pub struct Tokens {
    /// None if they are not known.
    pub positions: Option<TokenPositions>,
    /// None if the module has the rows of the batch.
    pub own: Option<OwnRows>,
}

impl Tokens {
    /// Returns the part of a turn; None unless a member of a batch takes it.
    pub fn of<'a>(turn: &Turn<'a, '_>) -> Option<&'a Self> {
        turn.part?.downcast_ref()
    }
}
