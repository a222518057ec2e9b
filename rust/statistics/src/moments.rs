//! Mean, variance and extremes in one pass.

use super::BLOCK;
use super::float::Float;

/// Number of independent sums: no addition waits for the one before it.
const LANES: usize = 8;

/// Moments and extremes of the finite ones among some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// Number of finite numbers.
    pub count: u64,
    /// 0 if there are none.
    pub mean: f64,
    /// The sum of the squared distances from the mean.
    pub squares: f64,
    /// Infinity if there are none.
    pub min: f64,
    /// Negative infinity if there are none.
    pub max: f64,
    /// Number of NaN and infinities, which are left out.
    pub not_finite: u64,
}

/// Sums of distances from a center, and the extremes.
struct Lanes {
    sum: [f64; LANES],
    squares: [f64; LANES],
    min: [f64; LANES],
    max: [f64; LANES],
}

impl Lanes {
    const NONE: Self = Self {
        sum: [0.0; LANES],
        squares: [0.0; LANES],
        min: [f64::INFINITY; LANES],
        max: [f64::NEG_INFINITY; LANES],
    };

    #[inline(always)]
    fn add(&mut self, lane: usize, center: f64, value: f64) {
        let distance = value - center;
        self.sum[lane] += distance;
        self.squares[lane] += distance * distance;
        // Not `f64::min`: it handles NaN and is no single instruction.
        let (min, max) = (&mut self.min[lane], &mut self.max[lane]);
        *min = if value < *min { value } else { *min };
        *max = if value > *max { value } else { *max };
    }
}

impl Default for Moments {
    fn default() -> Self {
        Self {
            count: 0,
            mean: 0.0,
            squares: 0.0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            not_finite: 0,
        }
    }
}

impl Moments {
    /// Reads each number once.
    #[must_use]
    #[inline(always)]
    pub fn of<T: Float>(values: &[T]) -> Self {
        let mut moments = Self::default();
        for block in values.chunks(BLOCK) {
            let of_block = Self::around(moments.mean, block);
            if of_block.squares.is_finite() {
                moments.merge(&of_block);
            } else {
                moments.merge(&Self::of_finite(moments.mean, block));
            }
        }
        moments
    }

    /// Moments of a block with non-finite numbers (or with non-finite squares).
    #[cold]
    fn of_finite<T: Float>(center: f64, block: &[T]) -> Self {
        let numbers = block.iter().map(|value| value.widen());
        let finite: Vec<f64> = numbers.filter(|number| number.is_finite()).collect();
        let moments = Self::around(center, &finite);
        Self {
            not_finite: (block.len() - finite.len()) as u64,
            // Infinity minus infinity.
            squares: if moments.squares.is_nan() {
                f64::INFINITY
            } else {
                moments.squares
            },
            ..moments
        }
    }

    /// Moments of a block, by the distances from `center`, the mean of all blocks before it.
    ///
    /// The difference of squares below cancels digits that are small beside the squared distance between
    /// the block's mean and `center`; but that distance is itself part of the overall variance.
    #[inline(always)]
    fn around<T: Float>(center: f64, values: &[T]) -> Self {
        let Some(first) = values.first() else {
            return Self::default();
        };
        // No mean before the first block: any of its numbers will do.
        let center = if center == 0.0 { first.widen() } else { center };
        let mut lanes = Lanes::NONE;
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, value) in chunk.iter().enumerate() {
                lanes.add(lane, center, value.widen());
            }
        }
        for (lane, value) in rest.iter().enumerate() {
            lanes.add(lane, center, value.widen());
        }
        let sum: f64 = lanes.sum.iter().sum();
        let distance = sum / values.len() as f64;
        let squares = lanes.squares.iter().sum::<f64>() - sum * distance;
        Self {
            count: values.len() as u64,
            mean: center + distance,
            // Not `max`, which hides NaN.
            squares: if squares < 0.0 { 0.0 } else { squares },
            min: lanes.min.into_iter().fold(f64::INFINITY, f64::min),
            max: lanes.max.into_iter().fold(f64::NEG_INFINITY, f64::max),
            not_finite: 0,
        }
    }

    /// Adds the moments of other numbers (Chan, Golub and `LeVeque`'s formula).
    pub fn merge(&mut self, other: &Self) {
        self.not_finite += other.not_finite;
        if other.count == 0 {
            return;
        }
        if self.count == 0 {
            *self = Self {
                not_finite: self.not_finite,
                ..*other
            };
            return;
        }
        let count = self.count + other.count;
        let share = other.count as f64 / count as f64;
        let distance = other.mean - self.mean;
        self.squares += other.squares + distance * distance * self.count as f64 * share;
        self.mean += distance * share;
        self.count = count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }
}
