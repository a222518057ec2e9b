//! The memory of tensors, read without torch.

use ferrohook_statistics::{Bf16, F16};
use pyo3::prelude::*;

use crate::torch::facts::Facts;

#[derive(Clone, Copy)]
enum Format {
    F32,
    F64,
    F16,
    Bf16,
}

impl Format {
    /// All of them, in the order of [`Facts::floats`].
    const ALL: [Self; 4] = [Self::F32, Self::F64, Self::F16, Self::Bf16];

    fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// Memory of a tensor that can be read without torch: a plain, contiguous one on the CPU, of one of
/// the four formats.
pub struct Memory<'py> {
    format: Format,
    address: usize,
    count: usize,
    /// Keeps the memory alive.
    _tensor: Bound<'py, PyAny>,
}

/// Numbers in a tensor's memory.
#[derive(Clone, Copy)]
pub enum Numbers<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    F16(&'a [F16]),
    Bf16(&'a [Bf16]),
}

impl<'py> Memory<'py> {
    /// Finds the memory; None for any other tensor, and for one without data.
    ///
    /// With `many` numbers or more it may be read without the interpreter.
    pub fn of(tensor: &Bound<'py, PyAny>, many: usize) -> PyResult<Option<Self>> {
        Facts::past_modes(tensor.py(), |facts| Self::past_modes(facts, tensor, many))
    }

    fn past_modes(
        facts: &Facts,
        tensor: &Bound<'py, PyAny>,
        many: usize,
    ) -> PyResult<Option<Self>> {
        if !facts.plain(tensor) {
            return Ok(None);
        }
        let count =
            |tensor: &Bound<'py, PyAny>| -> PyResult<usize> { facts.numel.of(tensor)?.extract() };
        let tensor = if count(tensor)? >= many || cfg!(Py_GIL_DISABLED) {
            // An alias keeps the memory alive if another thread assigns to the tensor's `data`
            // meanwhile. A mode may return any tensor: from here on only that tensor is read.
            facts.detach.of(tensor)?
        } else {
            tensor.clone()
        };
        if !facts.plain(&tensor) {
            return Ok(None);
        }
        let dtype = facts.dtype.of(&tensor)?;
        let mut formats = facts.floats.iter().zip(Format::ALL);
        let Some((_, format)) = formats.find(|(known, _)| dtype.is(*known)) else {
            return Ok(None);
        };
        let readable = facts.is_cpu.of(&tensor)?.is_truthy()?
            && facts.layout.of(&tensor)?.is(&facts.strided)
            && facts.is_contiguous.of(&tensor)?.is_truthy()?
            && !facts.is_neg.of(&tensor)?.is_truthy()?;
        if !readable {
            return Ok(None);
        }
        // Raises for tensors of functorch, which own no memory.
        let Ok(address) = facts.data_ptr.of(&tensor) else {
            return Ok(None);
        };
        let address: usize = address.extract()?;
        let count = count(&tensor)?;
        // No memory: an empty tensor, or its storage was freed (by FSDP, say) or cut.
        let offset: usize = facts.storage_offset.of(&tensor)?.extract()?;
        let there = facts.storage(&tensor)?;
        let ends = offset
            .checked_add(count)
            .and_then(|numbers| numbers.checked_mul(format.size()));
        let whole = address != 0
            && address.is_multiple_of(format.size())
            && ends.is_some_and(|end| end <= there);
        Ok(whole.then_some(Self {
            format,
            address,
            count,
            _tensor: tensor,
        }))
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// # Safety
    ///
    /// No thread writes the numbers or frees the tensor's memory while they are used.
    pub unsafe fn numbers(&self) -> Numbers<'_> {
        // SAFETY: the tensor itself says that at the address, aligned and not null, its storage has
        // this many numbers of this format, and keeps them alive. The rest is the caller's promise.
        unsafe {
            match self.format {
                Format::F32 => Numbers::F32(self.slice()),
                Format::F64 => Numbers::F64(self.slice()),
                Format::F16 => Numbers::F16(self.slice()),
                Format::Bf16 => Numbers::Bf16(self.slice()),
            }
        }
    }

    /// # Safety
    ///
    /// As for `numbers`, and `T` is of the format.
    unsafe fn slice<T>(&self) -> &[T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.count) }
    }
}

/// Makes torch reduce a tensor by a function of `ferrohook.detectors.reductions`. Returns a tuple, None for a
/// tensor without numbers, or an object to await the tuple from.
pub fn reduce<'py>(function: &str, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let reductions = tensor.py().import("ferrohook.detectors.reductions")?;
    reductions.call_method1("reduce", (function, tensor))
}
