//! Facts of a tensor that it knows itself, past attributes of the instance, Python classes and modes.

use pyo3::intern;
use pyo3::prelude::*;

use crate::cpython::invoke;
use crate::cpython::once::Once;

/// Getter or method of a class of torch's in C: it takes the object.
pub struct Fact(Py<PyAny>);

impl Fact {
    pub fn of<'py>(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        invoke::call(self.0.bind(object.py()), [object])
    }
}

/// Ways to ask a tensor itself.
pub struct Facts {
    classes: [Py<PyAny>; 2],
    pub strided: Py<PyAny>,
    /// The dtypes float32, float64, float16 and bfloat16.
    pub floats: [Py<PyAny>; 4],
    pub dtype: Fact,
    pub layout: Fact,
    pub nbytes: Fact,
    pub is_cpu: Fact,
    pub numel: Fact,
    pub detach: Fact,
    pub is_contiguous: Fact,
    pub is_neg: Fact,
    pub data_ptr: Fact,
    pub storage_offset: Fact,
    untyped_storage: Fact,
    /// `nbytes` of storages.
    bytes_there: Fact,
    /// `data_ptr` of storages.
    address: Fact,
    modes_enabled: Py<PyAny>,
    without_modes: Py<PyAny>,
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
            let method = |name| PyResult::Ok(Fact(base.getattr(name)?.unbind()));
            let attribute =
                |name| PyResult::Ok(Fact(base.getattr(name)?.getattr("__get__")?.unbind()));
            Ok(Self {
                classes: [
                    of_torch("Tensor")?,
                    torch.getattr("nn")?.getattr("Parameter")?.unbind(),
                ],
                strided: of_torch("strided")?,
                floats: [
                    of_torch("float32")?,
                    of_torch("float64")?,
                    of_torch("float16")?,
                    of_torch("bfloat16")?,
                ],
                dtype: attribute("dtype")?,
                layout: attribute("layout")?,
                nbytes: attribute("nbytes")?,
                is_cpu: attribute("is_cpu")?,
                numel: method("numel")?,
                detach: method("detach")?,
                is_contiguous: method("is_contiguous")?,
                is_neg: method("is_neg")?,
                data_ptr: method("data_ptr")?,
                storage_offset: method("storage_offset")?,
                untyped_storage: method("untyped_storage")?,
                address: Fact(native.getattr("StorageBase")?.getattr("data_ptr")?.unbind()),
                bytes_there: Fact(native.getattr("StorageBase")?.getattr("nbytes")?.unbind()),
                modes_enabled: of_native("_is_torch_function_mode_enabled")?,
                without_modes: of_native("DisableTorchFunction")?,
            })
        })
    }

    /// True if a tensor is of no subclass.
    pub fn is_plain(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(Self::get(tensor.py())?.plain(tensor))
    }

    /// Returns the address of a tensor's storage; None for a subclass, or a layout without one.
    pub fn address_of_storage(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        Self::past_modes(tensor.py(), |facts| {
            if !facts.plain(tensor) {
                return Ok(None);
            }
            let storage = facts.untyped_storage.of(tensor);
            let address = storage.and_then(|it| facts.address.of(&it));
            let address = address.and_then(|it| it.extract::<usize>()).ok();
            Ok(address.filter(|address| *address != 0))
        })
    }

    /// True for one of the usual dtypes of floating point.
    pub fn is_float(dtype: &Bound<'_, PyAny>) -> PyResult<bool> {
        let floats = &Self::get(dtype.py())?.floats;
        Ok(floats.iter().any(|each| dtype.is(each)))
    }

    /// Calls `ask` outside of modes, which may answer for torch.
    pub fn past_modes<R>(
        py: Python<'_>,
        ask: impl FnOnce(&'static Self) -> PyResult<R>,
    ) -> PyResult<R> {
        let facts = Self::get(py)?;
        if !facts.modes_enabled.bind(py).call0()?.is_truthy()? {
            return ask(facts);
        }
        let guard = facts.without_modes.bind(py).call0()?;
        guard.call_method0(intern!(py, "__enter__"))?;
        let found = ask(facts);
        let none = py.None();
        guard.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
        found
    }

    /// True if a tensor is of no subclass, which may store its numbers elsewhere.
    pub fn plain(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let class = tensor.get_type();
        self.classes.iter().any(|each| class.is(each))
    }

    /// Returns the number of bytes in a tensor's storage.
    pub fn storage(&self, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
        let storage = self.untyped_storage.of(tensor)?;
        self.bytes_there.of(&storage)?.extract()
    }
}
