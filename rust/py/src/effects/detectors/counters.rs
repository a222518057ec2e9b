//! Detectors of calls: their count, their latency, the shapes of their tensors.

use ferrohook_statistics::Histogram;
use pyo3::PyClassInitializer;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use rustc_hash::FxHashMap;

use super::{NativeDetector, SharedStatistics, Statistics};
use crate::hooks::native::Turn;
use crate::hooks::options::int_of;
use crate::torch::tensors;

/// Counts calls.
///
/// `snapshot()` has `calls`.
#[pyclass(frozen, extends = NativeDetector, module = "ferrohook.detectors")]
pub struct CallCounter;

#[pymethods]
impl CallCounter {
    #[new]
    fn new(py: Python<'_>) -> PyClassInitializer<Self> {
        NativeDetector::with(py, Self, CallCount::default())
    }
}

#[derive(Clone, Default)]
struct CallCount(u64);

impl Statistics for CallCount {
    fn observe(shared: &SharedStatistics<Self>, _turn: &Turn<'_, '_>) -> PyResult<()> {
        shared.statistics.lock().0 += 1;
        Ok(())
    }

    fn merge(&mut self, other: &Self) {
        self.0 += other.0;
    }

    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()> {
        into.set_item("calls", self.0)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.0.into_pyobject(py)?.into_any())
    }

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self> {
        saved.extract().map(Self)
    }
}

/// Measures latency: a histogram of the seconds from a module's start to its return, without the
/// hooks of the module itself.
///
/// `snapshot()` has `calls`, the seconds of `total`, `mean`, `min`, `max`, `p50` and `p99` (None
/// before the first call; the last two to within 1.6 %), and `histogram`: a list of (from, to,
/// calls), `to` included, of the ranges in which calls fell.
///
/// It observes the phase `forward`. On a GPU a module returns before its kernels have finished.
#[pyclass(frozen, extends = NativeDetector, module = "ferrohook.detectors")]
pub struct LatencyDetector;

#[pymethods]
impl LatencyDetector {
    #[new]
    fn new(py: Python<'_>) -> PyClassInitializer<Self> {
        NativeDetector::with(py, Self, Latency::default())
    }
}

/// Histogram of nanoseconds.
#[derive(Clone, Default)]
struct Latency(Histogram);

const NANOSECONDS: f64 = 1e9;

#[expect(
    clippy::cast_precision_loss,
    reason = "off by half a microsecond in a century"
)]
fn seconds(nanoseconds: u128) -> f64 {
    nanoseconds as f64 / NANOSECONDS
}

impl Statistics for Latency {
    const TIMES: bool = true;

    fn observe(shared: &SharedStatistics<Self>, turn: &Turn<'_, '_>) -> PyResult<()> {
        // None: the hook was registered while the module ran, or the module raised.
        if let Some(took) = turn.took {
            let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            shared.statistics.lock().0.record(nanoseconds);
        }
        Ok(())
    }

    fn merge(&mut self, other: &Self) {
        self.0.merge(&other.0);
    }

    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()> {
        let Self(histogram) = self;
        let range = histogram.range();
        let quantile = |share| Some(seconds(histogram.quantile(share)?.into()));
        into.set_item("calls", histogram.count())?;
        into.set_item("total", seconds(histogram.sum()))?;
        let mean = histogram.sum().checked_div(histogram.count().into());
        into.set_item("mean", mean.map(seconds))?;
        into.set_item("min", range.map(|(min, _)| seconds(min.into())))?;
        into.set_item("max", range.map(|(_, max)| seconds(max.into())))?;
        into.set_item("p50", quantile(0.5))?;
        into.set_item("p99", quantile(0.99))?;
        let buckets: Vec<_> = histogram
            .buckets()
            .map(|(low, high, calls)| (seconds(low.into()), seconds(high.into()), calls))
            .collect();
        into.set_item("histogram", buckets)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let buckets: Vec<_> = self.0.buckets().collect();
        Ok((buckets, self.0.sum(), self.0.range())
            .into_pyobject(py)?
            .into_any())
    }

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (buckets, sum, range): (Vec<_>, _, _) = saved.extract()?;
        Histogram::restored(buckets, sum, range)
            .map(Self)
            .ok_or_else(|| PyValueError::new_err("this is not a state of a LatencyDetector"))
    }
}

/// Counts the shapes of the tensors that pass.
///
/// `snapshot()` has `calls`, `shapes` (from each shape, a tuple, to its count of tensors) and
/// `others`, the count of tensors whose shape came after `limit` different ones or is not of
/// ints alone (nested tensors).
///
/// Args:
///     limit: number of shapes counted separately, which bounds the memory.
///
/// Raises:
///     HookTypeError: a `limit` that is no int.
///     ValueError: one below 0.
#[pyclass(frozen, extends = NativeDetector, module = "ferrohook.detectors")]
pub struct ShapeDetector;

#[pymethods]
impl ShapeDetector {
    #[new]
    #[pyo3(signature = (*, limit = Limit(1024)), text_signature = "(*, limit=1024)")]
    fn new(py: Python<'_>, limit: Limit) -> PyClassInitializer<Self> {
        let shapes = Shapes {
            limit: limit.0,
            ..Shapes::default()
        };
        NativeDetector::with(py, Self, shapes)
    }
}

/// Limit of shapes: an int, not a bool.
struct Limit(usize);

impl<'py> FromPyObject<'_, 'py> for Limit {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        int_of(object, "limit", "must be between 0 and 2**64 - 1").map(Self)
    }
}

type Shape = Vec<usize>;

#[derive(Clone, Default)]
struct Shapes {
    limit: usize,
    calls: u64,
    tensors: FxHashMap<Shape, u64>,
    others: u64,
}

impl Shapes {
    fn add(&mut self, shape: Shape, count: u64) {
        if let Some(known) = self.tensors.get_mut(&shape) {
            *known += count;
        } else if self.tensors.len() < self.limit {
            self.tensors.insert(shape, count);
        } else {
            self.others += count;
        }
    }
}

impl Statistics for Shapes {
    fn observe(shared: &SharedStatistics<Self>, turn: &Turn<'_, '_>) -> PyResult<()> {
        let mut shapes: Vec<Option<Shape>> = Vec::new();
        tensors::for_each_tensor(turn.value, &mut |tensor| {
            let shape = tensor.getattr(intern!(tensor.py(), "shape"));
            shapes.push(shape.and_then(|shape| shape.extract()).ok());
            Ok(())
        })?;
        let mut statistics = shared.statistics.lock();
        statistics.calls += 1;
        for shape in shapes {
            match shape {
                Some(shape) => statistics.add(shape, 1),
                None => statistics.others += 1,
            }
        }
        Ok(())
    }

    fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.others += other.others;
        for (shape, &count) in &other.tensors {
            self.add(shape.clone(), count);
        }
    }

    fn empty(&self) -> Self {
        Self {
            limit: self.limit,
            ..Self::default()
        }
    }

    fn describe(&self, into: &Bound<'_, PyDict>) -> PyResult<()> {
        let py = into.py();
        let shapes = PyDict::new(py);
        for (shape, count) in &self.tensors {
            shapes.set_item(PyTuple::new(py, shape)?, count)?;
        }
        into.set_item("calls", self.calls)?;
        into.set_item("shapes", shapes)?;
        into.set_item("others", self.others)
    }

    fn save<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let shapes = PyList::new(py, &self.tensors)?;
        Ok((self.limit, self.calls, shapes, self.others)
            .into_pyobject(py)?
            .into_any())
    }

    fn load(saved: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (limit, calls, shapes, others): (_, _, Vec<(Shape, u64)>, _) = saved.extract()?;
        Ok(Self {
            limit,
            calls,
            tensors: shapes.into_iter().collect(),
            others,
        })
    }
}
