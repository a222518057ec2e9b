//! The memory of tensors, read without torch.

use ferrohook_statistics::{Bf16, F16};
use pyo3::intern;
use pyo3::prelude::*;

use crate::cpython::once::Once;

/// Classes, layout and dtypes of tensors that can be read here.
struct Readable {
    classes: [Py<PyAny>; 2],
    layout: Py<PyAny>,
    formats: [(Py<PyAny>, Format); 4],
}

impl Readable {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static READABLE: Once<Readable> = Once::new();
        READABLE.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let of_torch = |name| torch.getattr(name).map(Bound::unbind);
            Ok(Self {
                classes: [
                    of_torch("Tensor")?,
                    torch.getattr("nn")?.getattr("Parameter")?.unbind(),
                ],
                layout: of_torch("strided")?,
                formats: [
                    (of_torch("float32")?, Format::F32),
                    (of_torch("float64")?, Format::F64),
                    (of_torch("float16")?, Format::F16),
                    (of_torch("bfloat16")?, Format::Bf16),
                ],
            })
        })
    }
}

#[derive(Clone, Copy)]
enum Format {
    F32,
    F64,
    F16,
    Bf16,
}

impl Format {
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
        let py = tensor.py();
        let readable = Readable::get(py)?;
        let class = tensor.get_type();
        // A subclass may store its numbers elsewhere.
        if !readable.classes.iter().any(|each| class.is(each)) {
            return Ok(None);
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let Some((_, format)) = readable.formats.iter().find(|(known, _)| dtype.is(known)) else {
            return Ok(None);
        };
        let plain = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?
            && tensor.getattr(intern!(py, "layout"))?.is(&readable.layout)
            && tensor
                .call_method0(intern!(py, "is_contiguous"))?
                .is_truthy()?
            && !tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
        if !plain {
            return Ok(None);
        }
        let count: usize = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        let tensor = if count >= many || cfg!(Py_GIL_DISABLED) {
            // An alias keeps the memory alive if another thread assigns to the tensor's `data`
            // meanwhile.
            tensor.call_method0(intern!(py, "detach"))?
        } else {
            tensor.clone()
        };
        // Raises for tensors of functorch, which have no memory of their own.
        let Ok(address) = tensor.call_method0(intern!(py, "data_ptr")) else {
            return Ok(None);
        };
        let address: usize = address.extract()?;
        // No memory: an empty tensor, or its storage was freed (by FSDP, say) or cut.
        let offset: usize = tensor
            .call_method0(intern!(py, "storage_offset"))?
            .extract()?;
        let there: usize = tensor
            .call_method0(intern!(py, "untyped_storage"))?
            .call_method0(intern!(py, "nbytes"))?
            .extract()?;
        let ends = offset
            .checked_add(count)
            .and_then(|numbers| numbers.checked_mul(format.size()));
        let whole = address != 0
            && address.is_multiple_of(format.size())
            && ends.is_some_and(|end| end <= there);
        Ok(whole.then_some(Self {
            format: *format,
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
        // SAFETY: by torch's account the address has this many numbers of this format and the
        // storage has room for them; it is aligned and not null, and the tensor keeps the memory
        // alive. The rest is the caller's promise.
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

/// Has torch reduce a tensor by a function of `ferrohook.reductions`. Returns a tuple, None for a
/// tensor without numbers, or an object to await the tuple from.
pub fn reduce<'py>(function: &str, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let reductions = tensor.py().import("ferrohook.reductions")?;
    reductions.call_method1("reduce", (function, tensor))
}
