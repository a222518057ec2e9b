//! Durations and their quantiles.

/// Number of bits below the leading one that select the bucket within an octave.
const BITS: u32 = 5;
const PER_OCTAVE: usize = 1 << BITS;
const BUCKETS: usize = (u64::BITS - BITS + 1) as usize * PER_OCTAVE;

/// Histogram of integers to within 1 part in 64: each octave has 32 buckets.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    sum: u128,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; BUCKETS].into(),
            count: 0,
            sum: 0,
            min: u64::MAX,
            max: 0,
        }
    }
}

impl Histogram {
    /// Counts a number.
    pub fn record(&mut self, value: u64) {
        self.buckets[bucket(value)] += 1;
        self.count += 1;
        self.sum += u128::from(value);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.buckets.iter_mut().zip(&other.buckets) {
            *own += other;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Number of recorded numbers.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Sum of the recorded numbers.
    #[must_use]
    pub fn sum(&self) -> u128 {
        self.sum
    }

    /// Smallest and largest recorded number.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        (self.count > 0).then_some((self.min, self.max))
    }

    /// Quantile: the number that a share of all (0.99 for p99) do not exceed, to within 1 part in
    /// 64.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let (min, max) = self.range()?;
        let rank = (share * self.count as f64).ceil().max(1.0);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen as f64 >= rank
        });
        let (low, width) = bounds(bucket?);
        Some((low + width / 2).clamp(min, max))
    }

    /// Non-empty buckets: the least number, the largest number and the count of each.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let buckets = self.buckets.iter().enumerate();
        buckets
            .filter(|(_, count)| **count > 0)
            .map(|(index, &count)| {
                let (low, width) = bounds(index);
                (low, low + (width - 1), count)
            })
    }

    /// Restores a histogram from the items of `Self::buckets`.
    ///
    /// None if they do not fit together: an unknown bucket, or a range that disagrees with the
    /// counts.
    #[must_use]
    pub fn restored(
        buckets: impl IntoIterator<Item = (u64, u64, u64)>,
        sum: u128,
        range: Option<(u64, u64)>,
    ) -> Option<Self> {
        let mut restored = Self::default();
        for (low, high, count) in buckets {
            let index = bucket(low);
            if bounds(index) != (low, high.checked_sub(low)?.checked_add(1)?) {
                return None;
            }
            restored.buckets[index] += count;
            restored.count = restored.count.checked_add(count)?;
        }
        if range.is_some() != (restored.count > 0) || range.is_some_and(|(min, max)| min > max) {
            return None;
        }
        (restored.min, restored.max) = range.unwrap_or((u64::MAX, 0));
        restored.sum = sum;
        Some(restored)
    }
}

fn bucket(value: u64) -> usize {
    // Small numbers have a bucket each, like numbers of the first octave.
    let octave = (value | 1).ilog2().saturating_sub(BITS);
    // Less than two octaves' buckets.
    let leading = usize::try_from(value >> octave).unwrap_or_default();
    octave as usize * PER_OCTAVE + leading
}

/// Least number of a bucket, and the count of integers that fall into it.
fn bounds(index: usize) -> (u64, u64) {
    let within = (index % PER_OCTAVE) as u64;
    match index / PER_OCTAVE {
        0 => (within, 1),
        octave => (
            (PER_OCTAVE as u64 + within) << (octave - 1),
            1 << (octave - 1),
        ),
    }
}
