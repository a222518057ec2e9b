//! Detectors of the numbers in tensors: NaN, infinities, and the distribution of the finite ones.
//!
//! They read tensors of floating point, complex ones included. A contiguous CPU tensor is read
//! here, without the interpreter if it is large; for all others torch computes the same, on the
//! tensor's device and asynchronously.

#![expect(
    clippy::inline_always,
    reason = "the caller's target features decide how the loop is compiled"
)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrohook_statistics::{Float, Moments, NonFinite};
use parking_lot::Mutex;
use pyo3::PyClassInitializer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::memory::{self, Memory, Numbers};
use super::{NativeDetector, SharedStatistics, Statistics};
use crate::cpython::invoke;
use crate::hooks::native::Turn;
use crate::torch::tensors;

/// Count of numbers from which releasing the interpreter costs little beside reading them.
const MANY: usize = 1 << 14;

/// Count of pending results at which finished ones are added.
const MANY_AWAITED: usize = 64;

/// Count of pending results at which the oldest are waited for, which bounds the memory.
const MOST_AWAITED: usize = 1024;

/// Place of an observation in the order of the process.
fn next_place() -> u64 {
    static PLACES: AtomicU64 = AtomicU64::new(0);
    // Relaxed: the places order nothing else.
    PLACES.fetch_add(1, Ordering::Relaxed)
}

/// Finds NaN and infinities.
///
/// `snapshot()` has `tensors` (the count of tensors read), `affected` (the count of those with NaN
/// or infinities), and the counts `nan` and `inf`. `modules` has a detector for each module that
/// `register` knows by name, and `first` the name of the first one affected.
///
/// It reads tensors of floating point, complex ones as pairs, and skips others, those without data
/// (fake ones, on `meta`) and classes that compute nothing. A masked tensor counts where the mask
/// is true, a `DTensor` by its local shard, and inside `torch.func` everything that is mapped over.
/// On a GPU it starts kernels, and waits for them only when it is read.
#[pyclass(frozen, extends = NativeDetector, module = "ferrohook.detectors")]
pub struct NonFiniteDetector;

#[pymethods]
impl NonFiniteDetector {
    #[new]
    fn new(py: Python<'_>) -> PyClassInitializer<Self> {
        NativeDetector::with(py, Self, FoundElements::default())
    }

    /// Name of the first module in which NaN or infinities were found, of the modules that
    /// `register` has put the detector on by name; None if there are none. Modules of a detector
    /// that was merged from another process come after modules affected before.
    #[getter]
    fn first(slf: &Bound<'_, Self>) -> PyResult<Option<String>> {
        slf.as_super().get().first(slf.py())
    }
}

/// Measures the distribution of the numbers in tensors.
///
/// `snapshot()` has `tensors` (the count of tensors read), `count` (of finite numbers), their
/// `mean`, `variance` (as `torch.var`), `rms`, `min` and `max` (None if there are too few), and
/// `not_finite`, the count of NaN and infinities, which are left out.
///
/// It reads tensors of floating point, complex ones as pairs, and skips others, those without data
/// (fake ones, on `meta`) and classes that compute nothing. A masked tensor counts where the mask
/// is true, a `DTensor` by its local shard, and inside `torch.func` everything that is mapped over.
/// On a GPU it starts kernels, and waits for them only when it is read.
#[pyclass(frozen, extends = NativeDetector, module = "ferrohook.detectors")]
pub struct NormDetector;

#[pymethods]
impl NormDetector {
    #[new]
    fn new(py: Python<'_>) -> PyClassInitializer<Self> {
        NativeDetector::with(py, Self, Norms::default())
    }
}

/// Statistics of the numbers of tensors.
trait OfElements: Statistics {
    /// Name of the function of `ferrohook.detectors.reductions` that computes them by torch.
    const BY_TORCH: &str;

    /// Its result.
    type Reduced: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>;

    /// Computes the statistics of one tensor.
    fn of<T: Float>(values: &[T]) -> Self;

    /// Converts torch's result for one tensor.
    fn of_reduced(reduced: Self::Reduced) -> Self;

    /// Sets the place of the observation of one tensor.
    fn at(self, _place: impl FnOnce() -> u64) -> Self {
        self
    }
}

#[derive(Clone, Default)]
struct FoundElements {
    tensors: u64,
    affected: u64,
    numbers: NonFinite,
    /// Place of the first affected tensor.
    first: Option<u64>,
}

impl From<NonFinite> for FoundElements {
    fn from(numbers: NonFinite) -> Self {
        Self {
            tensors: 1,
            affected: u64::from(numbers != NonFinite::default()),
            numbers,
            first: None,
        }
    }
}

impl OfElements for FoundElements {
    const BY_TORCH: &str = "non_finite";
    type Reduced = (u64, u64);

    #[inline(always)]
    fn of<T: Float>(values: &[T]) -> Self {
        NonFinite::of(values).into()
    }

    fn of_reduced((nan, infinite): (u64, u64)) -> Self {
        NonFinite { nan, infinite }.into()
    }

    fn at(mut self, place: impl FnOnce() -> u64) -> Self {
        self.first = (self.affected > 0).then(place);
        self
    }
}

impl Statistics for FoundElements {
    fn observe(shared: &SharedStatistics<Self>, turn: &Turn<'_, '_>) -> PyResult<()> {
        observe(shared, turn)
    }

    fn await_pending(shared: &SharedStatistics<Self>, py: Python<'_>) -> PyResult<()> {
        add_results(shared, py, true)
    }

    fn merge(&mut self, other: &Self) {
        self.tensors += other.tensors;
        self.affected += other.affected;
        self.numbers.merge(&other.numbers);
        self.first = self.first.into_iter().chain(other.first).min();
    }

    fn first(&self) -> Option<u64> {
        self.first
    }

    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()> {
        into.set_item("tensors", self.tensors)?;
        into.set_item("affected", self.affected)?;
        into.set_item("nan", self.numbers.nan)?;
        into.set_item("inf", self.numbers.infinite)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let NonFinite { nan, infinite } = self.numbers;
        Ok((self.tensors, self.affected, nan, infinite)
            .into_pyobject(py)?
            .into_any())
    }

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (tensors, affected, nan, infinite) = saved.extract()?;
        let loaded = Self {
            tensors,
            affected,
            numbers: NonFinite { nan, infinite },
            first: None,
        };
        Ok(loaded.at(next_place))
    }
}

#[derive(Clone, Default)]
struct Norms {
    tensors: u64,
    moments: Moments,
}

impl OfElements for Norms {
    const BY_TORCH: &str = "moments";
    type Reduced = (u64, f64, f64, f64, f64, u64);

    #[inline(always)]
    fn of<T: Float>(values: &[T]) -> Self {
        Self {
            tensors: 1,
            moments: Moments::of(values),
        }
    }

    fn of_reduced((count, mean, squares, min, max, not_finite): Self::Reduced) -> Self {
        Self {
            tensors: 1,
            moments: Moments {
                count,
                mean,
                squares,
                min,
                max,
                not_finite,
            },
        }
    }
}

impl Statistics for Norms {
    fn observe(shared: &SharedStatistics<Self>, turn: &Turn<'_, '_>) -> PyResult<()> {
        observe(shared, turn)
    }

    fn await_pending(shared: &SharedStatistics<Self>, py: Python<'_>) -> PyResult<()> {
        add_results(shared, py, true)
    }

    fn merge(&mut self, other: &Self) {
        self.tensors += other.tensors;
        self.moments.merge(&other.moments);
    }

    #[expect(clippy::cast_precision_loss, reason = "a divisor may round")]
    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()> {
        let moments = &self.moments;
        let count = moments.count as f64;
        let any = |value: f64| (moments.count > 0).then_some(value);
        into.set_item("tensors", self.tensors)?;
        into.set_item("count", moments.count)?;
        into.set_item("mean", any(moments.mean))?;
        let variance = (moments.count > 1).then(|| moments.squares / (count - 1.0));
        into.set_item("variance", variance)?;
        let mean_square = moments.squares / count + moments.mean * moments.mean;
        into.set_item("rms", any(mean_square.sqrt()))?;
        into.set_item("min", any(moments.min))?;
        into.set_item("max", any(moments.max))?;
        into.set_item("not_finite", moments.not_finite)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Moments {
            count,
            mean,
            squares,
            min,
            max,
            not_finite,
        } = self.moments;
        let moments = (count, mean, squares, min, max, not_finite);
        Ok((self.tensors, moments).into_pyobject(py)?.into_any())
    }

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (tensors, reduced) = saved.extract()?;
        Ok(Self {
            tensors,
            ..Self::of_reduced(reduced)
        })
    }
}

fn observe<S: OfElements>(shared: &SharedStatistics<S>, turn: &Turn<'_, '_>) -> PyResult<()> {
    tensors::for_each_tensor(turn.value, &mut |tensor| look_at(shared, tensor))
}

fn look_at<S: OfElements>(shared: &SharedStatistics<S>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = tensor.py();
    if let Some(memory) = Memory::of(tensor, MANY)? {
        shared.add(&read::<S>(py, &memory).at(next_place));
        return Ok(());
    }
    let result = memory::reduce(S::BY_TORCH, tensor)?;
    if result.is_none() {
        return Ok(()); // nothing to count
    }
    if let Ok(numbers) = result.cast::<PyTuple>() {
        shared.add(&S::of_reduced(numbers.extract()?).at(next_place));
        return Ok(());
    }
    let mut waiting = shared.awaited.lock();
    waiting.push_back((next_place(), result.unbind()));
    let many = waiting.len() >= MANY_AWAITED;
    drop(waiting);
    if many {
        add_results(shared, py, false)?;
    }
    Ok(())
}

impl<S: Statistics> SharedStatistics<S> {
    fn add(&self, more: &S) {
        self.statistics.lock().merge(more);
    }
}

fn read<S: OfElements>(py: Python<'_>, memory: &Memory<'_>) -> S {
    // SAFETY: no Rust reference to the memory is mutable. A thread that writes the tensor
    // meanwhile, or resizes its storage, races with this as with torch's own kernels, which also
    // read without the interpreter; callers of a model must not do that.
    let numbers = unsafe { memory.numbers() };
    if memory.count() >= MANY {
        invoke::detached(py, || reduce(numbers))
    } else {
        reduce(numbers)
    }
}

fn reduce<S: OfElements>(numbers: Numbers<'_>) -> S {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        return unsafe { reduce_by_avx2(numbers) };
    }
    reduce_by_any(numbers)
}

/// `reduce`, compiled for AVX2: vectors twice as wide as the baseline's.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn reduce_by_avx2<S: OfElements>(numbers: Numbers<'_>) -> S {
    reduce_by_any(numbers)
}

#[inline(always)]
fn reduce_by_any<S: OfElements>(numbers: Numbers<'_>) -> S {
    match numbers {
        Numbers::F32(values) => S::of(values),
        Numbers::F64(values) => S::of(values),
        Numbers::F16(values) => S::of(values),
        Numbers::Bf16(values) => S::of(values),
    }
}

/// Pending results of devices, the oldest first: objects of `ferrohook.detectors.reductions`, each
/// with the place of its observation. Not shown to
/// the garbage collector: they refer to nothing that could be part of a cycle.
pub type Awaited = Mutex<VecDeque<(u64, Py<PyAny>)>>;

/// Adds the finished results, or with `wait` all.
///
/// Each stays in the list until it is added, so that concurrent readers wait for it too.
fn add_results<S: OfElements>(
    shared: &SharedStatistics<S>,
    py: Python<'_>,
    wait: bool,
) -> PyResult<()> {
    let waiting = shared.awaited.lock();
    let results = waiting.iter().map(|(place, it)| (*place, it.clone_ref(py)));
    let results: Vec<_> = results.collect();
    drop(waiting);
    let too_many = results.len() >= MOST_AWAITED;
    for (number, (place, result)) in results.into_iter().enumerate() {
        let result = result.bind(py);
        let wait = wait || too_many && number < MOST_AWAITED / 2;
        let numbers = result.call_method1(intern!(py, "numbers"), (wait,))?;
        if numbers.is_none() {
            break;
        }
        let more = S::of_reduced(numbers.extract()?).at(|| place);
        let mut waiting = shared.awaited.lock();
        // Another thread may have added it.
        if let Some(at) = waiting.iter().position(|(each, _)| *each == place) {
            let removed = waiting.remove(at);
            shared.add(&more);
            drop(waiting);
            drop(removed);
        }
    }
    Ok(())
}
