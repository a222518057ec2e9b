//! Infinities and NaN.

use super::BLOCK;
use super::float::Float;

/// Counts of NaN and of infinities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonFinite {
    /// Not a number.
    pub nan: u64,
    /// Positive or negative infinity.
    pub infinite: u64,
}

impl NonFinite {
    /// Reads each number once.
    #[must_use]
    #[inline(always)]
    pub fn of<T: Float>(values: &[T]) -> Self {
        let mut found = Self::default();
        for block in values.chunks(BLOCK) {
            // Nearly always there is none. A loop without an early exit becomes vector
            // instructions.
            let any = block
                .iter()
                .fold(T::Flag::default(), |any, value| any | value.not_finite());
            if any != T::Flag::default() {
                for value in block {
                    let nan = value.is_nan();
                    let not_finite = value.not_finite() != T::Flag::default();
                    found.nan += u64::from(nan);
                    found.infinite += u64::from(not_finite && !nan);
                }
            }
        }
        found
    }

    /// Adds the counts of other numbers.
    pub fn merge(&mut self, other: &Self) {
        self.nan += other.nan;
        self.infinite += other.infinite;
    }
}
