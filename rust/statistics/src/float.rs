//! Floating-point numbers as tensors hold them.

/// Number of a format that is read in place.
pub trait Float: Copy + Send + Sync + 'static {
    /// Flag of a non-finite number, 1 or 0. As wide as the number, so that a loop over many becomes
    /// vector instructions.
    type Flag: Copy + Default + PartialEq + std::ops::BitOr<Output = Self::Flag>;

    /// Returns 1 for NaN and infinities, else 0.
    fn not_finite(self) -> Self::Flag;

    /// True for NaN.
    fn is_nan(self) -> bool;

    /// Converts to `f64`, without loss.
    fn widen(self) -> f64;
}

/// IEEE 754's format of 16 bits.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of an `f32`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Float for f32 {
    type Flag = u32;

    #[inline(always)]
    fn not_finite(self) -> u32 {
        u32::from(!self.is_finite())
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }

    #[inline(always)]
    fn widen(self) -> f64 {
        self.into()
    }
}

impl Float for f64 {
    type Flag = u64;

    #[inline(always)]
    fn not_finite(self) -> u64 {
        u64::from(!self.is_finite())
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }

    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
}

impl Float for F16 {
    type Flag = u16;

    #[inline(always)]
    fn not_finite(self) -> u16 {
        u16::from(self.0 & 0x7fff >= 0x7c00)
    }

    fn is_nan(self) -> bool {
        self.0 & 0x7fff > 0x7c00
    }

    #[inline(always)]
    fn widen(self) -> f64 {
        // The bits shifted into an f32's places; only the exponent's bias differs: 127 for 15.
        let magnitude = f32::from_bits(u32::from(self.0 & 0x7fff) << 13);
        let sign = u32::from(self.0 & 0x8000) << 16;
        let rebias = f32::from_bits((127 + 127 - 15) << 23);
        let finite = (magnitude * rebias).to_bits();
        let not_finite = 0x7f80_0000 | u32::from(self.0 & 0x3ff) << 13;
        let bits = if self.0 & 0x7c00 == 0x7c00 {
            not_finite
        } else {
            finite
        };
        f32::from_bits(bits | sign).into()
    }
}

impl Float for Bf16 {
    type Flag = u16;

    #[inline(always)]
    fn not_finite(self) -> u16 {
        u16::from(self.0 & 0x7fff >= 0x7f80)
    }

    fn is_nan(self) -> bool {
        self.0 & 0x7fff > 0x7f80
    }

    #[inline(always)]
    fn widen(self) -> f64 {
        f32::from_bits(u32::from(self.0) << 16).into()
    }
}
