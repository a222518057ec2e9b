//! Statistics against their definitions.

#![expect(clippy::cast_precision_loss, reason = "counts here are small")]

use ferrohook_statistics::{Bf16, F16, Float, Histogram, Moments, NonFinite};

/// Numbers that are summed at a time.
const BLOCK: usize = 1024;

/// Decodes by the definition of the format.
fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

fn same(found: f64, expected: f64) -> bool {
    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan()
}

#[test]
fn all_numbers_of_16_bits_are_what_their_formats_say() {
    for bits in 0..=u16::MAX {
        let expected = half(bits);
        let found = F16(bits);
        assert_eq!(found.not_finite() == 1, !expected.is_finite(), "{bits:#x}");
        assert_eq!(found.is_nan(), expected.is_nan(), "{bits:#x}");
        assert!(same(found.widen(), expected), "{bits:#x}");

        let expected = f64::from(f32::from_bits(u32::from(bits) << 16));
        let found = Bf16(bits);
        assert_eq!(found.not_finite() == 1, !expected.is_finite(), "{bits:#x}");
        assert_eq!(found.is_nan(), expected.is_nan(), "{bits:#x}");
        assert!(same(found.widen(), expected), "{bits:#x}");
    }
}

#[test]
fn each_number_is_within_its_bucket() {
    let near = (0..64).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + 1]);
    for value in near.chain([u64::MAX, 12_345, 999_999_999]) {
        let mut histogram = Histogram::default();
        histogram.record(value);
        let buckets: Vec<_> = histogram.buckets().collect();
        let [(low, high, 1)] = buckets[..] else {
            panic!("{value} is in {buckets:?}");
        };
        assert!(low <= value && value <= high, "{value}");
        assert!(low == high || high - low < low / 32, "{value}");
    }
}

#[test]
fn quantiles_are_close_to_those_of_the_numbers() {
    let mut histogram = Histogram::default();
    assert_eq!(histogram.quantile(0.5), None);
    let mut numbers: Vec<u64> = (0..10_000u64).map(|n| n * n * 7919 % 1_000_003).collect();
    for &number in &numbers {
        histogram.record(number);
    }
    numbers.sort_unstable();
    for (share, rank) in [(0.0, 1), (0.5, 5_000), (0.99, 9_900), (1.0, 10_000)] {
        let (found, expected) = (histogram.quantile(share).unwrap(), numbers[rank - 1]);
        assert!(
            found.abs_diff(expected) * 64 <= expected,
            "{found} for {expected}"
        );
    }
}

#[test]
fn what_was_merged_or_restored_is_as_counted_at_once() {
    let (mut all, mut left, mut right) = <(Histogram, Histogram, Histogram)>::default();
    for value in (0..2_000).map(|n| n * 1_000_003) {
        all.record(value);
        if value % 3 == 0 {
            &mut left
        } else {
            &mut right
        }
        .record(value);
    }
    left.merge(&right);
    let again = Histogram::restored(left.buckets(), left.sum(), left.range()).unwrap();
    for found in [left, again] {
        assert!(found.buckets().eq(all.buckets()));
        assert_eq!(
            (found.count(), found.sum(), found.range()),
            (all.count(), all.sum(), all.range())
        );
    }
}

#[test]
fn what_does_not_fit_together_is_not_restored() {
    assert!(Histogram::restored([(64, 64, 1)], 64, Some((64, 64))).is_none());
    assert!(Histogram::restored([(1, 1, 1)], 1, None).is_none());
    assert!(Histogram::restored([(2, 1, 1)], 1, Some((1, 1))).is_none());
    assert!(Histogram::restored([(1, 1, 1)], 1, Some((2, 1))).is_none());
    assert!(Histogram::restored([(1, 1, u64::MAX), (2, 2, 1)], 1, Some((1, 2))).is_none());
}

fn close(found: f64, expected: f64) {
    let error = (found - expected).abs();
    assert!(
        error <= 1e-12 * expected.abs().max(1.0),
        "{found} for {expected}"
    );
}

#[test]
fn they_are_those_of_the_definition() {
    let around_blocks = (BLOCK - 1..=BLOCK + 1).chain([5 * BLOCK + 7]);
    for count in (1..40).chain(around_blocks) {
        let values: Vec<f64> = (0..count).map(|n| ((n * 37 % 101) as f64) - 20.0).collect();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum();
        let found = Moments::of(&values);
        assert_eq!(found.count, count as u64);
        close(found.mean, mean);
        close(found.squares, squares);
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert_eq!((found.min, found.max), (min, max));
    }
}

#[test]
fn a_large_mean_does_not_drown_a_small_variance() {
    let values: Vec<f64> = (0..100_000).map(|n| 1e9 + f64::from(n % 2)).collect();
    let found = Moments::of(&values);
    close(found.squares / found.count as f64, 0.25);
}

#[test]
fn what_is_not_finite_is_counted_and_left_out() {
    let mut values = vec![2.0f32; 3 * BLOCK];
    values[BLOCK + 1] = f32::NAN;
    values[BLOCK + 2] = f32::INFINITY;
    let found = Moments::of(&values);
    assert_eq!((found.count, found.not_finite), (3 * BLOCK as u64 - 2, 2));
    assert_eq!(
        (found.mean, found.squares, found.min, found.max),
        (2.0, 0.0, 2.0, 2.0)
    );
    let none = Moments::of(&[f32::NAN; 3]);
    assert_eq!(
        none,
        Moments {
            not_finite: 3,
            ..Moments::default()
        }
    );
}

#[test]
fn squares_beyond_all_numbers_are_infinite() {
    let found = Moments::of(&[1e200, -1e200, 1e200]);
    assert!(found.squares.is_infinite(), "{found:?}");
}

#[test]
fn merging_is_as_looking_at_all() {
    let values: Vec<f32> = (0..10_000u16).map(|n| f32::from(n % 97)).collect();
    let all = Moments::of(&values);
    for at in [0, 1, 5_000, 9_999, 10_000] {
        let mut merged = Moments::of(&values[..at]);
        merged.merge(&Moments::of(&values[at..]));
        assert_eq!(
            (merged.count, merged.min, merged.max),
            (all.count, all.min, all.max)
        );
        close(merged.mean, all.mean);
        close(merged.squares, all.squares);
    }
}

#[test]
fn each_place_is_looked_at() {
    for place in [0, 1, 7, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 2] {
        let mut values = vec![1.0f32; 2 * BLOCK + 3];
        values[place] = f32::NAN;
        let nan = NonFinite::of(&values);
        values[place] = f32::NEG_INFINITY;
        let infinite = NonFinite::of(&values);
        assert_eq!((nan.nan, nan.infinite), (1, 0));
        assert_eq!((infinite.nan, infinite.infinite), (0, 1));
    }
}

#[test]
fn the_largest_and_the_smallest_are_finite() {
    let values = [f64::MAX, f64::MIN, 5e-324, -0.0];
    assert_eq!(NonFinite::of(&values), NonFinite::default());
    assert_eq!(NonFinite::of::<f32>(&[]), NonFinite::default());
}
