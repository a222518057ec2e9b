//! `BatchBase`: a frame whose calls serve many requests, each with rows of its own.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PySlice, PyTuple};
use rustc_hash::FxHashMap;

use crate::contexts::current;
use crate::contexts::frame::Frame;
use crate::error::{hook_type_error, rows_error, type_name};
use crate::torch::is_tensor;

/// Rows of a dimension.
pub enum Rows {
    /// `length` rows from `start`.
    Range {
        start: usize,
        length: usize,
    },
    Index(Index),
}

/// Rows in any order.
pub struct Index {
    pub rows: Box<[usize]>,
    /// Tensors of the rows, one for each device.
    tensors: Mutex<Vec<(Py<PyAny>, Py<PyAny>)>>,
}

impl Index {
    /// Returns the rows as a tensor on the device of another.
    pub fn on_device_of<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let device = tensor.getattr(intern!(py, "device"))?;
        {
            let tensors = self.tensors.lock();
            for (of, index) in tensors.iter() {
                if of.bind(py).eq(&device)? {
                    return Ok(index.bind(py).clone());
                }
            }
        }
        let options = PyDict::new(py);
        options.set_item(intern!(py, "device"), &device)?;
        let torch = py.import(intern!(py, "torch"))?;
        let rows = self.rows.to_vec();
        let index = torch.call_method(intern!(py, "tensor"), (rows,), Some(&options))?;
        let made = (device.unbind(), index.clone().unbind());
        self.tensors.lock().push(made);
        Ok(index)
    }
}

impl Rows {
    /// Makes rows from their numbers.
    pub fn of(rows: Vec<usize>) -> Self {
        let start = rows.first().copied().unwrap_or_default();
        if rows.iter().enumerate().all(|(at, row)| *row == start + at) {
            return Self::Range {
                start,
                length: rows.len(),
            };
        }
        Self::Index(Index {
            rows: rows.into(),
            tensors: Mutex::default(),
        })
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Range { length, .. } => *length,
            Self::Index(index) => index.rows.len(),
        }
    }

    /// The row behind the last one.
    fn end(&self) -> usize {
        match self {
            Self::Range { length: 0, .. } => 0,
            Self::Range { start, length } => start.saturating_add(*length),
            Self::Index(index) => index.rows.iter().max().map_or(0, |last| last + 1),
        }
    }

    pub fn iter(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self {
            Self::Range { start, length } => Box::new(*start..start + length),
            Self::Index(index) => Box::new(index.rows.iter().copied()),
        }
    }

    /// True if [`Self::narrow`] copies.
    pub fn copies(&self) -> bool {
        matches!(self, Self::Index(_))
    }

    /// Takes the rows of a tensor: a view of a range, a copy else.
    pub fn narrow<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dim: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        match self {
            Self::Range { start, length } => {
                tensor.call_method1(intern!(py, "narrow"), (dim, *start, *length))
            }
            Self::Index(index) => {
                let index = index.on_device_of(tensor)?;
                tensor.call_method1(intern!(py, "index_select"), (dim, index))
            }
        }
    }

    /// Writes the rows of a tensor in place.
    pub fn write<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dim: usize,
        values: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = tensor.py();
        match self {
            Self::Range { .. } => {
                let rows = self.narrow(tensor, dim)?;
                rows.call_method1(intern!(py, "copy_"), (values,))?;
            }
            Self::Index(index) => {
                let index = index.on_device_of(tensor)?;
                tensor.call_method1(intern!(py, "index_copy_"), (dim, index, values))?;
            }
        }
        Ok(())
    }

    /// Reads rows as they are given to `fh.batch`; `size`: number of rows of the batch, if known.
    fn read(rows: &Bound<'_, PyAny>, size: Option<usize>) -> PyResult<Self> {
        let py = rows.py();
        let unknown = || {
            let message = "negative rows and slices without an end count from the number of rows: \
                           give positions or size";
            rows_error(py, message.to_owned())
        };
        if let Ok(slice) = rows.cast::<PySlice>() {
            let bound = |name| slice.getattr(name)?.extract::<Option<i64>>();
            let (start, stop) = (bound("start")?, bound("stop")?);
            let step = bound("step")?.unwrap_or(1);
            if step < 1 {
                let message = format!("the step of a slice of rows is at least 1, got {step}");
                return Err(PyValueError::new_err(message));
            }
            let place = |bound: i64| match usize::try_from(bound) {
                Ok(bound) => Ok(bound),
                Err(_) => {
                    let from_end = usize::try_from(-bound).unwrap_or(usize::MAX);
                    Ok(size.ok_or_else(unknown)?.saturating_sub(from_end))
                }
            };
            let start = start.map_or(Ok(0), place)?;
            let stop = stop.map_or_else(|| size.ok_or_else(unknown), place)?;
            if step == 1 {
                let length = stop.saturating_sub(start);
                return Ok(Self::Range { start, length });
            }
            let step = usize::try_from(step).unwrap_or(usize::MAX);
            return Ok(Self::of((start..stop).step_by(step).collect()));
        }
        let one = rows.is_instance_of::<PyInt>();
        let wrong = |_| {
            let message = format!(
                "rows are an int, a slice, a sequence of ints or an index tensor, got {}",
                type_name(rows)
            );
            hook_type_error(py, message)
        };
        let numbers: Vec<i64> = if one {
            vec![rows.extract().map_err(wrong)?]
        } else if is_tensor(rows)? {
            let dims: usize = rows.call_method0(intern!(py, "dim"))?.extract()?;
            let boolean = rows
                .getattr("dtype")?
                .is(&py.import("torch")?.getattr("bool")?);
            let floating = rows.call_method0("is_floating_point")?.is_truthy()?;
            if dims != 1 || boolean || floating {
                let message = "rows are an index tensor of ints with one dimension".to_owned();
                return Err(hook_type_error(py, message));
            }
            rows.call_method0(intern!(py, "tolist"))?.extract()?
        } else {
            rows.extract().map_err(wrong)?
        };
        let place = |row: i64| match usize::try_from(row) {
            Ok(row) => Ok(row),
            Err(_) => {
                let from_end = usize::try_from(-row).unwrap_or(usize::MAX);
                let size = size.ok_or_else(unknown)?;
                size.checked_sub(from_end).ok_or_else(|| {
                    rows_error(
                        py,
                        format!("row {row} is out of range: the batch has {size}"),
                    )
                })
            }
        };
        numbers
            .into_iter()
            .map(place)
            .collect::<PyResult<_>>()
            .map(Self::of)
    }
}

/// Limit for the number of rows.
const MOST_ROWS: usize = 1 << 24;

/// Request, scope or capture in a batch.
pub struct Member {
    pub frame: Py<Frame>,
    pub rows: Rows,
    /// The frame alone, as the frames of its calls.
    pub frames: Py<PyTuple>,
    /// True once one of its hooks ran.
    pub ran: AtomicBool,
}

/// Rows that the tensors of one module have.
pub struct Layout {
    pub dim: usize,
    pub size: usize,
    /// Rows of each member; None: those of the batch.
    gathered: Option<Box<[Rows]>>,
}

/// Index of the rows of a module, and their dimension.
struct Gathered {
    /// Index tensor, or the function that makes it.
    index: Py<PyAny>,
    dim: usize,
}

/// Base of batches.
#[pyclass(frozen, subclass, extends = Frame, module = "ferrohook._core")]
pub struct BatchBase {
    members: Box<[Member]>,
    dim: usize,
    size: OnceLock<usize>,
    /// Number of rows up to the last one of a member.
    named: usize,
    /// True if the positions of the rows are known.
    positioned: bool,
    /// True if a member has hooks that run Python, which may write in place.
    python: bool,
    /// Modules with rows of their own, by address.
    gathered: FxHashMap<usize, Gathered>,
    modules: Vec<Py<PyAny>>,
    joined: AtomicBool,
}

#[pymethods]
impl BatchBase {
    #[new]
    #[pyo3(signature = (rows, dim, size, positioned, gathered, *_others))]
    fn new(
        rows: &Bound<'_, PyDict>,
        dim: usize,
        size: Option<usize>,
        positioned: bool,
        gathered: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>, Option<usize>)>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<(Self, Frame)> {
        let py = rows.py();
        if rows.is_empty() {
            let message = "a batch has at least one request".to_owned();
            return Err(rows_error(py, message));
        }
        let mut members = Vec::with_capacity(rows.len());
        let mut named = 0;
        for (frame, rows) in rows.iter() {
            let frame = frame.cast_into::<Frame>().map_err(|error| {
                let got = type_name(&error.into_inner());
                let message = format!("a batch has requests, scopes and captures, got {got}");
                hook_type_error(py, message)
            })?;
            if frame.cast::<Self>().is_ok() {
                let message = "a batch is no member of another".to_owned();
                return Err(rows_error(py, message));
            }
            let rows = Rows::read(&rows, size)?;
            named = named.max(rows.end());
            members.push(Member {
                frames: PyTuple::new(py, [&frame])?.unbind(),
                frame: frame.unbind(),
                rows,
                ran: AtomicBool::new(false),
            });
        }
        if let Some(size) = size
            && named > size
        {
            let message = format!("row {} is out of range: the batch has {size}", named - 1);
            return Err(rows_error(py, message));
        }
        if named > MOST_ROWS {
            let message = format!("row {} is out of range: a batch has {MOST_ROWS}", named - 1);
            return Err(rows_error(py, message));
        }
        owners(py, &members, named)?;
        let mut modules = Vec::new();
        let mut by_address = FxHashMap::default();
        for (module, index, own) in gathered {
            let index = index.unbind();
            let dim = own.unwrap_or(dim);
            by_address.insert(module.as_ptr() as usize, Gathered { index, dim });
            modules.push(module.unbind());
        }
        let batch = Self {
            python: members.iter().any(|it| it.frame.get().runs_python()),
            members: members.into(),
            dim,
            size: size.map_or_else(OnceLock::new, OnceLock::from),
            named,
            positioned,
            gathered: by_address,
            modules,
            joined: AtomicBool::new(false),
        };
        Ok((batch, Frame::new(None)))
    }

    /// Dimension of the rows.
    #[getter]
    fn dim(&self) -> usize {
        self.dim
    }

    /// Takes the rows of a member from a tensor of the batch's rows.
    fn _narrow<'py>(
        &self,
        member: usize,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.members[member].rows.narrow(tensor, 0)
    }

    /// Number of rows; None before it is known.
    #[getter]
    fn size(&self) -> Option<usize> {
        self.size.get().copied()
    }

    /// The requests, scopes and captures, in the order in which they were given.
    #[getter]
    fn members<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, Frame>> {
        let frames = self.members.iter().map(|it| it.frame.bind(py).clone());
        frames.collect()
    }

    /// The members whose modules ran in it: bools, in order.
    #[getter]
    fn _ran(&self) -> Vec<bool> {
        let ran = self.members.iter().map(|it| it.ran.load(Ordering::Relaxed));
        ran.collect()
    }

    /// Number of calls, so far, of hooks that may change a value, those of members included.
    fn changes(slf: &Bound<'_, Self>) -> PyResult<u64> {
        let py = slf.py();
        let members = slf.get().members.iter().map(|it| it.frame.get());
        let mut frames = std::iter::once(slf.as_super().get()).chain(members);
        frames.try_fold(0, |sum, frame| Ok(sum + frame.changes(py)?))
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        for frame in current::active(py)?.iter() {
            if let Ok(outer) = frame.cast::<Self>()
                && !outer.as_super().get().closed()
            {
                let message = "a batch inside a batch: a call has one".to_owned();
                return Err(rows_error(py, message));
            }
        }
        if this.joined.swap(true, Ordering::Relaxed) {
            let message = "a batch is entered once: make another for the next step".to_owned();
            return Err(rows_error(py, message));
        }
        for (at, member) in this.members.iter().enumerate() {
            Frame::join(member.frame.bind(py)).inspect_err(|_| this.part(at))?;
        }
        let enter = || {
            slf.call_method0(intern!(py, "_begin"))?;
            Frame::enter(slf.as_super())
        };
        enter().inspect_err(|_| this.part(this.members.len()))
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        Frame::leave(slf.as_super())?;
        let members = &slf.get().members;
        slf.get().part(members.len());
        let ran = |member: &Member| member.ran.load(Ordering::Relaxed);
        if error.is_none() && !members.iter().all(ran) {
            slf.call_method0(intern!(slf.py(), "_warn_of_silence"))?;
        }
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for member in &self.members {
            visit.call(&member.frame)?;
            visit.call(&member.frames)?;
        }
        for gathered in self.gathered.values() {
            visit.call(&gathered.index)?;
        }
        self.modules
            .iter()
            .try_for_each(|module| visit.call(module))
    }
}

impl BatchBase {
    /// Finds the batch among the entered frames: the innermost.
    pub fn find<'a, 'py>(frames: &'a Bound<'py, PyTuple>) -> Option<Bound<'py, Self>> {
        let mut found = None;
        for frame in frames.iter_borrowed() {
            if let Ok(batch) = frame.cast::<Self>()
                && !batch.as_super().get().closed()
            {
                found = Some((*batch).clone());
            }
        }
        found
    }

    /// True if a member of the entered batch has a hook for the module with this id.
    pub fn has_hooks(frames: &Bound<'_, PyTuple>, module: u64, phases: &[Phase]) -> bool {
        let hooked = |member: &Member| {
            let frame = member.frame.get();
            let mut phases = phases.iter();
            !frame.failed() && phases.any(|phase| frame.snapshot(module, *phase).is_some())
        };
        Self::find(frames).is_some_and(|batch| batch.get().members.iter().any(hooked))
    }

    pub fn all(&self) -> &[Member] {
        &self.members
    }

    pub fn positioned(&self) -> bool {
        self.positioned
    }

    /// True if a member has hooks that run Python, which may write in place.
    pub fn runs_python(&self) -> bool {
        self.python
    }

    /// Sets the number of rows, unless it is known, from the call of a member's model.
    pub fn set_size(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.size.get().is_none() {
            let mut size = None;
            crate::torch::tensors::for_each_tensor(value, &mut |tensor| {
                if size.is_none() {
                    size = length(tensor, self.dim)?.filter(|size| *size >= self.named);
                }
                Ok(())
            })?;
            if let Some(size) = size {
                let _ = self.size.set(size);
            }
        }
        Ok(())
    }

    /// Number of rows; without positions, `size` or a call of a member's model, those of members.
    pub fn rows(&self) -> usize {
        self.size.get().copied().unwrap_or(self.named)
    }

    /// Finds the rows of a module's tensors.
    pub fn layout<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        output: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Layout> {
        let gathered = match self.gathered.is_empty() {
            true => None,
            false => self.gathered.get(&(module.as_ptr() as usize)),
        };
        let Some(gathered) = gathered else {
            return Ok(Layout {
                dim: self.dim,
                size: self.rows(),
                gathered: None,
            });
        };
        let py = module.py();
        let mut index = gathered.index.bind(py).clone();
        if !is_tensor(&index)? {
            let kwargs = kwargs.map_or_else(|| PyDict::new(py), Bound::clone);
            index = index.call1((module, args, kwargs, output))?;
        }
        let index = index.call_method0(intern!(py, "flatten"))?;
        let index: Vec<i64> = index.call_method0(intern!(py, "tolist"))?.extract()?;
        let owners = owners(py, &self.members, self.named)?;
        let mut rows = vec![Vec::new(); self.members.len()];
        for (at, row) in index.iter().enumerate() {
            let owner = usize::try_from(*row).ok().and_then(|row| owners.get(row));
            if let Some(Some(member)) = owner {
                rows[*member].push(at);
            }
        }
        Ok(Layout {
            dim: gathered.dim,
            size: index.len(),
            gathered: Some(rows.into_iter().map(Rows::of).collect()),
        })
    }

    fn part(&self, members: usize) {
        for member in &self.members[..members] {
            member.frame.get().part();
        }
    }
}

impl Layout {
    /// Rows of a member.
    pub fn rows<'a>(&'a self, batch: &'a BatchBase, member: usize) -> &'a Rows {
        match &self.gathered {
            Some(gathered) => &gathered[member],
            None => &batch.members[member].rows,
        }
    }

    /// True if the tensor has the rows.
    pub fn covers(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(length(tensor, self.dim)? == Some(self.size))
    }
}

/// Length of a dimension of a tensor; None if it has fewer.
fn length(tensor: &Bound<'_, PyAny>, dim: usize) -> PyResult<Option<usize>> {
    let shape = tensor.getattr(intern!(tensor.py(), "shape"))?;
    let shape = shape.cast::<PyTuple>()?;
    if shape.len() <= dim {
        return Ok(None);
    }
    shape.get_borrowed_item(dim)?.extract().map(Some)
}

/// Member of each row, None for a row of nobody.
fn owners(py: Python<'_>, members: &[Member], named: usize) -> PyResult<Vec<Option<usize>>> {
    let mut owners = vec![None; named];
    for (number, member) in members.iter().enumerate() {
        for row in member.rows.iter() {
            if let Some(other) = owners[row].replace(number) {
                let message = if other == number {
                    format!("row {row} is named twice for member {number} of the batch")
                } else {
                    format!("rows overlap: row {row} is of members {other} and {number}")
                };
                return Err(rows_error(py, message));
            }
        }
    }
    Ok(owners)
}
