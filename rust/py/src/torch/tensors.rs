//! Structures of tensors: tuples, lists, dicts, `UserDict`s, dataclasses and packed sequences.

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};

use crate::cpython::once::Once;
use crate::torch::facts::Facts;
use crate::torch::is_tensor;

/// Depth below which structures count as leaves.
const DEEPEST: usize = 64;

/// One level of a structure.
enum Structure<'py> {
    Tensor,
    /// A `PackedSequence`: its data are the tensor, the others say where sequences are in it.
    Packed(Bound<'py, PyTuple>),
    Tuple(Bound<'py, PyTuple>),
    List(Bound<'py, PyList>),
    /// A dict, or that inside a `UserDict` (a transformers `BatchFeature`).
    Dict(Bound<'py, PyDict>),
    /// The names of its fields that are set.
    Dataclass(Vec<Bound<'py, PyString>>),
    Leaf,
}

impl<'py> Structure<'py> {
    fn of(value: &Bound<'py, PyAny>, depth: usize) -> PyResult<Self> {
        if is_tensor(value)? {
            return Ok(Self::Tensor);
        }
        if depth > DEEPEST {
            return Ok(Self::Leaf);
        }
        if let Ok(tuple) = value.cast::<PyTuple>() {
            let packed = !tuple.is_exact_instance_of::<PyTuple>() && is_packed(value)?;
            let tuple = tuple.clone();
            return Ok(if packed {
                Self::Packed(tuple)
            } else {
                Self::Tuple(tuple)
            });
        }
        if let Ok(list) = value.cast::<PyList>() {
            return Ok(Self::List(list.clone()));
        }
        if let Ok(dict) = value.cast::<PyDict>() {
            return Ok(Self::Dict(dict.clone()));
        }
        if is_user_dict(value)? {
            let data = value.getattr(intern!(value.py(), "data"))?;
            return Ok(data.cast_into().map_or(Self::Leaf, Self::Dict));
        }
        let fields = value.getattr_opt(intern!(value.py(), "__dataclass_fields__"))?;
        let Some(fields) = fields.filter(|_| !value.is_instance_of::<PyType>()) else {
            return Ok(Self::Leaf);
        };
        let mut names = Vec::new();
        for name in fields.try_iter()? {
            let name = name?.cast_into::<PyString>()?;
            if value.hasattr(&name)? {
                names.push(name);
            }
        }
        Ok(Self::Dataclass(names))
    }

    fn items(&self, value: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        match self {
            Self::Tensor | Self::Leaf => Ok(Vec::new()),
            Self::Packed(tuple) => Ok(vec![tuple.get_item(0)?]),
            Self::Tuple(tuple) => Ok(tuple.iter().collect()),
            Self::List(list) => Ok(list.iter().collect()),
            Self::Dict(dict) => Ok(dict.values().iter().collect()),
            Self::Dataclass(names) => names.iter().map(|name| value.getattr(name)).collect(),
        }
    }

    /// Rebuilds the structure around other items.
    fn with_items(
        &self,
        value: &Bound<'py, PyAny>,
        items: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        // A copy has the same class (a transformers ModelOutput is a dict) and leaves the model's
        // own.
        let copy = || py.import("copy")?.call_method1("copy", (value,));
        match self {
            Self::Tensor | Self::Leaf => Ok(value.clone()),
            Self::Packed(tuple) => py
                .import(intern!(py, "ferrohook.util.tensors"))?
                .call_method1(intern!(py, "repacked"), (tuple, &items[0])),
            Self::Tuple(tuple) => tuple_with_items(tuple, items),
            Self::List(_) => Ok(PyList::new(py, items)?.into_any()),
            Self::Dict(dict) => {
                let copy = copy()?;
                for (key, item) in dict.keys().iter().zip(items) {
                    copy.set_item(key, item)?;
                }
                Ok(copy)
            }
            Self::Dataclass(names) => {
                let copy = copy()?;
                // Works for a frozen dataclass too.
                let set = py.get_type::<PyAny>().getattr(intern!(py, "__setattr__"))?;
                for (name, item) in names.iter().zip(items) {
                    set.call1((&copy, name, item))?;
                }
                Ok(copy)
            }
        }
    }
}

fn is_packed(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    static PACKED: Once<Py<PyType>> = Once::new();
    value.is_instance(PACKED.import(value.py(), "torch.nn.utils.rnn", "PackedSequence")?)
}

fn is_user_dict(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    static USER_DICT: Once<Py<PyType>> = Once::new();
    value.is_instance(USER_DICT.import(value.py(), "collections", "UserDict")?)
}

fn tuple_with_items<'py>(
    tuple: &Bound<'py, PyTuple>,
    items: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tuple.py();
    if tuple.is_exact_instance_of::<PyTuple>() {
        return Ok(PyTuple::new(py, items)?.into_any());
    }
    py.import(intern!(py, "ferrohook.util.tensors"))?
        .call_method1(intern!(py, "same_tuple"), (tuple, items))
}

/// Returns a tensor that has its memory for itself: a copy, unless it fills its storage already.
pub fn owned<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if fills_its_storage(tensor).unwrap_or(false) {
        return Ok(tensor.clone());
    }
    copied(tensor)
}

/// Returns a copy of a tensor.
pub fn copied<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    // One made in inference mode could never be part of a graph.
    outside_inference(py, || tensor.call_method0(intern!(py, "clone")))
}

/// Makes a tensor outside of the inference mode that this thread may be in.
pub fn outside_inference<'py>(
    py: Python<'py>,
    make: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let torch = py.import(intern!(py, "torch"))?;
    let inference = torch.call_method0(intern!(py, "is_inference_mode_enabled"))?;
    if !inference.is_truthy()? {
        return make();
    }
    let normal = torch.call_method1(intern!(py, "inference_mode"), (false,))?;
    normal.call_method0(intern!(py, "__enter__"))?;
    let result = make();
    normal.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
    result
}

/// True if a tensor, of no subclass, has each number of its storage, once. Raises for one of another
/// layout.
fn fills_its_storage(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    Facts::past_modes(tensor.py(), |facts| {
        Ok(facts.plain(tensor)
            && facts.nbytes.of(tensor)?.extract::<usize>()? == facts.storage(tensor)?
            && facts.is_contiguous.of(tensor)?.is_truthy()?)
    })
}

/// Returns hidden state and residual of a layer that returns such a pair, if `part` names their sum.
pub fn summed<'py>(
    value: &Bound<'py, PyAny>,
    part: &Bound<'py, PyAny>,
) -> Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let pair = value.cast::<PyTuple>().ok()?;
    let named = pair.len() == 2 && part.cast::<PyString>().is_ok_and(|part| part == "sum");
    named.then(|| pair.extract().ok())?
}

/// Splits an `output_index` that is a path, a tuple of steps, into the path of the enclosing value
/// and the last step; for a single step the path is empty.
pub fn last_step<'py>(
    part: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyAny>)> {
    let Ok(path) = part.cast::<PyTuple>() else {
        return Ok((PyTuple::empty(part.py()), part.clone()));
    };
    let last = path.len().saturating_sub(1);
    Ok((path.get_slice(0, last), path.get_item(last)?))
}

/// Finds the part of a value that an `output_index` names, a step or a tuple of steps.
pub fn part_of<'py>(
    value: &Bound<'py, PyAny>,
    part: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    match part.cast::<PyTuple>() {
        Ok(path) => path
            .iter()
            .try_fold(value.clone(), |value, step| part_at(&value, &step)),
        Err(_) => part_at(value, part),
    }
}

/// Finds the part of a value at one step: a [sum](summed), its item or, by a name that is no key,
/// its attribute.
fn part_at<'py>(
    value: &Bound<'py, PyAny>,
    part: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    if let Some((hidden, residual)) = summed(value, part) {
        return hidden.add(residual);
    }
    let Ok(name) = part.cast::<PyString>() else {
        return value.get_item(part);
    };
    // SAFETY: a live object.
    let has_keys = unsafe { ffi::PyMapping_Check(value.as_ptr()) } != 0;
    if value.is_instance_of::<PyTuple>() || !has_keys {
        return value.getattr(name);
    }
    let found = value.get_item(part);
    found.or_else(|error| value.getattr(name).map_err(|_| error))
}

/// Copies a value with the part that [`part_of`] finds replaced.
pub fn with_part<'py>(
    value: &Bound<'py, PyAny>,
    part: &Bound<'py, PyAny>,
    item: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    if part.cast::<PyTuple>().is_ok_and(PyTupleMethods::is_empty) {
        return Ok(item.clone());
    }
    let (around, last) = last_step(part)?;
    let changed = with_part_at(&part_of(value, &around)?, &last, item)?;
    with_part(value, &around, &changed)
}

/// Copies a value with the part at one step replaced. An index of a dict is an index of a
/// transformers `ModelOutput`.
fn with_part_at<'py>(
    value: &Bound<'py, PyAny>,
    part: &Bound<'py, PyAny>,
    item: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = value.py();
    let name = part.cast::<PyString>().ok();
    if let Ok(tuple) = value.cast::<PyTuple>() {
        let items = tuple.to_list();
        if name.is_some() {
            // The fields of named tuples and of torch.return_types.
            let fields = tuple.get_type().getattr(intern!(py, "__match_args__"))?;
            items.set_item(fields.cast_into::<PyTuple>()?.index(part)?, item)?;
        } else {
            items.as_any().set_item(part, item)?;
        }
        return tuple_with_items(tuple, items.iter().collect());
    }
    let copy = if is_tensor(value)? {
        value.call_method0(intern!(py, "clone"))? // a shallow copy has its memory
    } else {
        py.import("copy")?.call_method1("copy", (value,))?
    };
    if let Some(name) = name
        && value.get_item(part).is_err()
    {
        // Works for a frozen dataclass too.
        let set = py.get_type::<PyAny>().getattr(intern!(py, "__setattr__"))?;
        set.call1((&copy, name, item))?;
        return Ok(copy);
    }
    match value.cast::<PyDict>() {
        Ok(dict) if !dict.contains(part)? => {
            copy.set_item(dict.keys().as_any().get_item(part)?, item)?;
        }
        _ => copy.set_item(part, item)?,
    }
    Ok(copy)
}

/// Calls `look` with each tensor of a structure.
pub fn for_each_tensor<'py>(
    value: &Bound<'py, PyAny>,
    look: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    for_each_below(value, 0, look)
}

/// Returns the tensors of a structure, in order.
pub fn tensors_of<'py>(value: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut found = Vec::new();
    for_each_tensor(value, &mut |tensor| {
        found.push(tensor.clone());
        Ok(())
    })?;
    Ok(found)
}

/// True if `test` is, for one of the tensors of a structure.
pub fn any_tensor<'py>(
    value: &Bound<'py, PyAny>,
    test: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<bool>,
) -> PyResult<bool> {
    let mut any = false;
    for_each_tensor(value, &mut |tensor| {
        any = any || test(tensor)?;
        Ok(())
    })?;
    Ok(any)
}

fn for_each_below<'py>(
    value: &Bound<'py, PyAny>,
    depth: usize,
    look: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    match Structure::of(value, depth)? {
        Structure::Tensor => look(value),
        structure => {
            let mut items = structure.items(value)?.into_iter();
            items.try_for_each(|item| for_each_below(&item, depth + 1, look))
        }
    }
}

/// Rebuilds the structure with each tensor replaced by the result of `change`.
pub fn map_tensors<'py>(
    value: &Bound<'py, PyAny>,
    change: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    map_below(value, 0, change)
}

fn map_below<'py>(
    value: &Bound<'py, PyAny>,
    depth: usize,
    change: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match Structure::of(value, depth)? {
        Structure::Tensor => change(value),
        Structure::Leaf => Ok(value.clone()),
        structure => {
            let items = structure.items(value)?.into_iter();
            let changed = items.map(|item| map_below(&item, depth + 1, change));
            let changed = changed.collect::<PyResult<_>>()?;
            structure.with_items(value, changed)
        }
    }
}

type LookAtPair<'a, 'py> = dyn FnMut(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<()> + 'a;

/// Calls `look` with each tensor of a structure and its counterpart in another; false if the
/// structures or other leaves differ.
pub fn for_each_pair<'py>(
    first: &Bound<'py, PyAny>,
    second: &Bound<'py, PyAny>,
    look: &mut LookAtPair<'_, 'py>,
) -> PyResult<bool> {
    let equal = |one: &Bound<'py, PyAny>, other: &Bound<'py, PyAny>| {
        one.is(other) || one.eq(other).unwrap_or(false)
    };
    each_pair_below(first, second, 0, &equal, look)
}

/// True if two structures have tensors at the same places.
pub fn same_places<'py>(first: &Bound<'py, PyAny>, second: &Bound<'py, PyAny>) -> PyResult<bool> {
    each_pair_below(first, second, 0, &|_, _| true, &mut |_, _| Ok(()))
}

/// `equal`: compares leaves that are no tensors.
fn each_pair_below<'py>(
    first: &Bound<'py, PyAny>,
    second: &Bound<'py, PyAny>,
    depth: usize,
    equal: &dyn Fn(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> bool,
    look: &mut LookAtPair<'_, 'py>,
) -> PyResult<bool> {
    let structures = (Structure::of(first, depth)?, Structure::of(second, depth)?);
    let same = match &structures {
        (Structure::Tensor, Structure::Tensor) => {
            look(first, second)?;
            return Ok(true);
        }
        (Structure::Leaf, Structure::Leaf) => return Ok(equal(first, second)),
        (Structure::Dict(first), Structure::Dict(second)) => {
            first.keys().as_any().eq(second.keys().as_any())?
        }
        (Structure::Tuple(_), Structure::Tuple(_))
        | (Structure::List(_), Structure::List(_))
        | (Structure::Packed(_), Structure::Packed(_)) => true,
        (Structure::Dataclass(first), Structure::Dataclass(second)) => first.len() == second.len(),
        _ => false,
    };
    let (items, others) = (structures.0.items(first)?, structures.1.items(second)?);
    if !same || items.len() != others.len() {
        return Ok(false);
    }
    for (item, other) in items.iter().zip(&others) {
        if !each_pair_below(item, other, depth + 1, equal, look)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// True if autograd computes a gradient for the tensor.
pub fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor
        .getattr(intern!(tensor.py(), "requires_grad"))?
        .is_truthy()
}

/// Reads the version counter of a tensor; an error for an inference tensor, which has none.
pub fn version(tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}

/// Reads the version counter of a tensor; None for one that has none.
pub fn version_if_any(tensor: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    // Asking takes a three-hundredth of raising in C++ and catching.
    Ok(if is_inference(tensor)? {
        None
    } else {
        version(tensor).ok()
    })
}

/// True for a tensor that was made in inference mode: autograd saves none, and none has a version.
pub fn is_inference(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let inference = tensor.call_method0(intern!(tensor.py(), "is_inference"))?;
    inference.is_truthy()
}

/// Makes a tensor on the host, whatever the default device is.
pub fn host_tensor<'py, T>(py: Python<'py>, numbers: T, dtype: &str) -> PyResult<Bound<'py, PyAny>>
where
    T: IntoPyObject<'py>,
{
    let torch = py.import(intern!(py, "torch"))?;
    let options = PyDict::new(py);
    options.set_item(intern!(py, "dtype"), torch.getattr(dtype)?)?;
    options.set_item(intern!(py, "device"), intern!(py, "cpu"))?;
    torch.call_method(intern!(py, "tensor"), (numbers,), Some(&options))
}
