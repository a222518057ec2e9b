//! The memory of tensors, read without torch.

use ferrohook_statistics::{Bf16, F16};
use pyo3::intern;
use pyo3::prelude::*;

use crate::cpython::invoke;
use crate::cpython::once::Once;

/// Ways to ask a tensor itself, past attributes of the instance and of Python classes, and what makes
/// one readable here.
struct Facts {
    classes: [Py<PyAny>; 2],
    strided: Py<PyAny>,
    formats: [(Py<PyAny>, Format); 4],
    dtype: Attribute,
    layout: Attribute,
    is_cpu: Attribute,
    // Methods of torch's class in C.
    numel: Py<PyAny>,
    detach: Py<PyAny>,
    is_contiguous: Py<PyAny>,
    is_neg: Py<PyAny>,
    data_ptr: Py<PyAny>,
    storage_offset: Py<PyAny>,
    untyped_storage: Py<PyAny>,
    /// Of storages.
    nbytes: Py<PyAny>,
    modes_enabled: Py<PyAny>,
    without_modes: Py<PyAny>,
}

/// Attribute of torch's class in C: its getter, which takes the tensor.
struct Attribute(Py<PyAny>);

impl Attribute {
    fn of<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        invoke::call(self.0.bind(tensor.py()), [tensor])
    }
}

impl Facts {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static FACTS: Once<Facts> = Once::new();
        FACTS.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let of_torch = |name| torch.getattr(name).map(Bound::unbind);
            let native = torch.getattr("_C")?;
            let of_native = |name| native.getattr(name).map(Bound::unbind);
            let base = native.getattr("TensorBase")?;
            let method = |name| base.getattr(name).map(Bound::unbind);
            let attribute = |name| {
                let getter = base.getattr(name)?.getattr("__get__")?;
                PyResult::Ok(Attribute(getter.unbind()))
            };
            let storage = native.getattr("StorageBase")?;
            Ok(Self {
                classes: [
                    of_torch("Tensor")?,
                    torch.getattr("nn")?.getattr("Parameter")?.unbind(),
                ],
                strided: of_torch("strided")?,
                formats: [
                    (of_torch("float32")?, Format::F32),
                    (of_torch("float64")?, Format::F64),
                    (of_torch("float16")?, Format::F16),
                    (of_torch("bfloat16")?, Format::Bf16),
                ],
                dtype: attribute("dtype")?,
                layout: attribute("layout")?,
                is_cpu: attribute("is_cpu")?,
                numel: method("numel")?,
                detach: method("detach")?,
                is_contiguous: method("is_contiguous")?,
                is_neg: method("is_neg")?,
                data_ptr: method("data_ptr")?,
                storage_offset: method("storage_offset")?,
                untyped_storage: method("untyped_storage")?,
                nbytes: storage.getattr("nbytes")?.unbind(),
                modes_enabled: of_native("_is_torch_function_mode_enabled")?,
                without_modes: of_native("DisableTorchFunction")?,
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
        let facts = Facts::get(py)?;
        if !facts.modes_enabled.bind(py).call0()?.is_truthy()? {
            return Self::without_modes(facts, tensor, many);
        }
        // A mode may answer for torch; nothing but the tensor knows its memory.
        let guard = facts.without_modes.bind(py).call0()?;
        guard.call_method0(intern!(py, "__enter__"))?;
        let found = Self::without_modes(facts, tensor, many);
        let none = py.None();
        guard.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
        found
    }

    fn without_modes(
        facts: &Facts,
        tensor: &Bound<'py, PyAny>,
        many: usize,
    ) -> PyResult<Option<Self>> {
        let py = tensor.py();
        // A subclass may store its numbers elsewhere.
        let plain = |tensor: &Bound<'py, PyAny>| {
            let class = tensor.get_type();
            facts.classes.iter().any(|each| class.is(each))
        };
        if !plain(tensor) {
            return Ok(None);
        }
        let count = |tensor: &Bound<'py, PyAny>| -> PyResult<usize> {
            invoke::call(facts.numel.bind(py), [tensor])?.extract()
        };
        let tensor = if count(tensor)? >= many || cfg!(Py_GIL_DISABLED) {
            // An alias keeps the memory alive if another thread assigns to the tensor's `data`
            // meanwhile. A mode may return any tensor: from here on it alone is asked.
            invoke::call(facts.detach.bind(py), [tensor])?
        } else {
            tensor.clone()
        };
        if !plain(&tensor) {
            return Ok(None);
        }
        let dtype = facts.dtype.of(&tensor)?;
        let Some((_, format)) = facts.formats.iter().find(|(known, _)| dtype.is(known)) else {
            return Ok(None);
        };
        let asked = |method: &Py<PyAny>| invoke::call(method.bind(py), [&tensor]);
        let readable = facts.is_cpu.of(&tensor)?.is_truthy()?
            && facts.layout.of(&tensor)?.is(&facts.strided)
            && asked(&facts.is_contiguous)?.is_truthy()?
            && !asked(&facts.is_neg)?.is_truthy()?;
        if !readable {
            return Ok(None);
        }
        // Raises for tensors of functorch, which have no memory of their own.
        let Ok(address) = asked(&facts.data_ptr) else {
            return Ok(None);
        };
        let address: usize = address.extract()?;
        let count = count(&tensor)?;
        // No memory: an empty tensor, or its storage was freed (by FSDP, say) or cut.
        let offset: usize = asked(&facts.storage_offset)?.extract()?;
        let storage = asked(&facts.untyped_storage)?;
        let there: usize = invoke::call(facts.nbytes.bind(py), [&storage])?.extract()?;
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
        // SAFETY: by the tensor's own account, which no attribute or mode of Python's changes, the
        // address has this many numbers of this format and the storage has room for them; it is aligned and not null, and the tensor keeps the memory
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
