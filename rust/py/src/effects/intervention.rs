//! Interventions: native hooks that change one tensor of a module's input or output.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::exceptions::{PyAttributeError, PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::cpython::invoke;
use crate::error::{caused, hook_type_error, is_hook_error, repr, selection_error, type_name};
use crate::hooks::native::{NativeHook, Outcome, Turn};
use crate::rows::mask::Mask;
use crate::rows::matrix::CallArguments;
use crate::torch;
use crate::torch::facts::Facts;
use crate::torch::made::{MadeTensors, StreamOrder};
use crate::torch::nested::{is_nested, map_dense};
use crate::torch::tensors::{last_step, part_of, summed, with_part};

/// Tensors with a row for each of some interventions, as tensors of one dtype and device take them.
pub struct Table {
    /// Numbers of the interventions.
    pub key: Box<[u64]>,
    pub dtype: Py<PyAny>,
    pub device: Py<PyAny>,
    pub tensors: Py<PyTuple>,
    pub order: StreamOrder,
}

/// Base of interventions.
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts, three of them of the vector"
)]
#[pyclass(frozen, subclass, extends = NativeHook, module = "ferrohook._core")]
pub struct InterventionBase {
    /// Returns a tensor, changed, called with it, the vector and the numbers.
    formula: Py<PyAny>,
    /// Numbers that the formula takes.
    pub numbers: Py<PyTuple>,
    /// True if it adds its vector.
    adds: bool,
    /// Index, key or attribute of the changed tensor.
    pub part: Option<Py<PyAny>>,
    /// Width of the vector: the last dimension of the tensors that it fits.
    pub width: Option<usize>,
    /// True if the vector broadcasts to `x` and has rows, which must not widen it.
    has_rows: bool,
    /// True if the vector is complex.
    pub complex: bool,
    /// True if the vector is trained: it has another graph in each call.
    pub trained: bool,
    /// Form of the operation in a trace, made by the first, see `ferrohook.effects.interventions`.
    traced: OnceLock<Py<PyTuple>>,
    /// True if it changes the sum of two tensors.
    pub sums: bool,
    /// Number of dimensions of the vector; None without one.
    pub dims: Option<usize>,
    /// Number of the intervention, unique in the process.
    pub number: u64,
    /// The vector as tensors of some dtypes and devices take it.
    casts: MadeTensors<(Py<PyAny>, Py<PyAny>)>,
    /// Tables of batches whose first intervention it is.
    pub tables: Mutex<Vec<Table>>,
    /// Reads tensors for it: interventions of one class with the same reader read the rows of all
    /// members of a batch at once.
    pub reader: Option<Py<PyAny>>,
    /// True if graphs can have it.
    pub traces: bool,
}

#[pymethods]
impl InterventionBase {
    #[new]
    #[pyo3(signature = (formula, numbers, part, vector, broadcasts, adds, reader = None, *, traces = true))]
    #[expect(clippy::too_many_arguments, reason = "a class passes them")]
    fn new(
        py: Python<'_>,
        formula: Py<PyAny>,
        numbers: Py<PyTuple>,
        part: Option<Py<PyAny>>,
        vector: Option<Bound<'_, PyAny>>,
        broadcasts: bool,
        adds: bool,
        reader: Option<Py<PyAny>>,
        traces: bool,
    ) -> PyResult<(Self, NativeHook)> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let (shape, trained, complex) = match vector {
            Some(vector) => (
                Some(vector.getattr("shape")?.extract::<Vec<usize>>()?),
                torch::tensors::requires_grad(&vector)?,
                vector.call_method0("is_complex")?.is_truthy()?,
            ),
            None => (None, false, false),
        };
        let width = shape.as_ref().and_then(|shape| shape.last().copied());
        let dims = shape.map(|shape| shape.len());
        let last = part.as_ref().map(|part| last_step(part.bind(py)));
        let named = |last: &Bound<'_, PyAny>| last.cast::<PyString>().is_ok_and(|it| it == "sum");
        let intervention = Self {
            sums: last.transpose()?.is_some_and(|(_, last)| named(&last)),
            formula,
            numbers,
            adds,
            part,
            width: width.filter(|width| *width != 1), // one broadcasts
            has_rows: broadcasts && dims.is_some_and(|dims| dims > 1),
            complex,
            trained,
            traced: OnceLock::new(),
            dims,
            // Relaxed: the numbers order nothing.
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            casts: MadeTensors::default(),
            tables: Mutex::default(),
            reader,
            traces,
        };
        Ok((intervention, NativeHook::of::<Self>()))
    }

    /// Returns a value with the change applied, as its hook returns it.
    ///
    /// Raises:
    ///     HookTypeError: the value, or what `output_index` names, is no tensor that the vector fits.
    ///     SelectionError: the value lacks the `output_index`.
    fn apply<'py>(
        slf: &Bound<'py, Self>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let change = Change {
            intervention: slf,
            describe: &|| type_name(slf),
            extent: None,
        };
        change.part_of(value, &|x, residual| change.tensor(x, residual))
    }

    // No `__clear__`: tensors refer to nothing here.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.formula)?;
        visit.call(&self.numbers)?;
        visit.call(&self.part)?;
        visit.call(&self.reader)?;
        visit.call(self.traced.get())?;
        self.casts.traverse(&visit)?;
        for table in self.tables.lock().iter() {
            visit.call(&table.tensors)?;
        }
        Ok(())
    }
}

impl InterventionBase {
    /// Returns the form of the operation in a trace.
    pub fn traced_form<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let py = slf.py();
        let this = slf.get();
        if this.traced.get().is_none() {
            // Not in `get_or_init`: the method runs Python.
            let form = slf.call_method1(intern!(py, "_traced"), (&this.numbers,))?;
            let _ = this.traced.set(form.cast_into::<PyTuple>()?.unbind());
        }
        Ok(this.traced.wait().bind(py).clone())
    }

    /// Applies it to the value of a turn, in an extent or everywhere. Returns the replacement.
    pub fn run_in<'py>(
        slf: &Bound<'py, Self>,
        turn: &Turn<'_, 'py>,
        extent: Option<&Extent<'py>>,
    ) -> Outcome<'py> {
        let change = Change {
            intervention: slf,
            describe: turn.describe,
            extent: extent.map(|extent| (extent, CallArguments::of(turn))),
        };
        if matches!(turn.phase, Phase::BackwardPre | Phase::Backward) {
            return change.gradients(turn.value);
        }
        if turn.phase == Phase::ForwardPre && turn.args.is_empty() {
            return Err(change.error(
                "it changes positional arguments, but this call has only keyword arguments: \
                 register a function with with_kwargs=True",
            ));
        }
        let value = if turn.phase == Phase::ForwardPre && turn.args.len() != 1 {
            turn.args.as_any()
        } else {
            turn.value
        };
        let changed = change.part_of(value, &|x, residual| change.tensor(x, residual))?;
        if turn.phase == Phase::ForwardPre && turn.args.len() == 1 {
            return Ok(Some(PyTuple::new(slf.py(), [changed])?.into_any()));
        }
        Ok(Some(changed))
    }
}

/// Changes a tensor, or the hidden state of its sum with a residual. The sum is taken of changed rows
/// alone: of others, sum less residual is the hidden state only up to rounding.
pub type ChangeTensor<'a, 'py> =
    dyn Fn(&Bound<'py, PyAny>, Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> + 'a;

/// Changes a tensor by `change`, or its sum with a residual, of which it takes the difference.
pub fn with_residual<'py>(
    x: &Bound<'py, PyAny>,
    residual: Option<&Bound<'py, PyAny>>,
    change: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match residual {
        Some(residual) => change(&x.add(residual)?)?.sub(residual),
        None => change(x),
    }
}

/// One invocation of an intervention.
pub struct Change<'a, 'py> {
    pub intervention: &'a Bound<'py, InterventionBase>,
    /// Describes hook, phase and module, for errors.
    pub describe: &'a dyn Fn() -> String,
    /// Extent of its changes, with the arguments of the call; None: everywhere, all the way.
    pub extent: Option<(&'a Extent<'py>, CallArguments<'a, 'py>)>,
}

/// Extent of a change: tokens and strength.
pub struct Extent<'py> {
    /// None: everywhere.
    pub mask: Option<Arc<Mask>>,
    /// None: all the way.
    pub strength: Option<Strength<'py>>,
}

/// Strength `s` of a change: `x + s (changed - x)`.
pub enum Strength<'py> {
    /// One for all tokens.
    Number(Bound<'py, PyAny>),
    /// A number for each of the mask's tokens, in order.
    OfTokens(Arc<Mask>, Bound<'py, PyAny>),
}

impl<'py> Extent<'py> {
    /// Returns `x`, changed in this extent alone.
    pub fn of(
        &self,
        describe: &dyn Fn() -> String,
        mut changed: Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        call: CallArguments<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(strength) = &self.strength {
            let strength = match strength {
                Strength::Number(number) => number.clone(),
                Strength::OfTokens(mask, numbers) => {
                    mask.spread(describe, numbers, x, Some(call))?
                }
            };
            changed = lerp(&changed, x, strength)?;
        }
        match &self.mask {
            Some(mask) => mask.merge(describe, &changed, x, Some(call)),
            None => Ok(changed),
        }
    }
}

/// Returns `x + strength * (changed - x)`.
pub fn lerp<'py>(
    changed: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    strength: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    // Exact at both ends, and computed in float32 for half precision.
    let py = x.py();
    let changed = changed.call_method1(intern!(py, "to"), (x,))?;
    x.call_method1(intern!(py, "lerp"), (changed, strength))
}

impl<'py> Change<'_, 'py> {
    fn py(&self) -> Python<'py> {
        self.intervention.py()
    }

    /// Changes the part of a value that the intervention is for; `tensor` changes a tensor, see
    /// [`ChangeTensor`].
    pub fn part_of(
        &self,
        value: &Bound<'py, PyAny>,
        tensor: &ChangeTensor<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(part) = &self.intervention.get().part else {
            if torch::is_tensor(value)? {
                return tensor(value, None);
            }
            return Err(self.no_tensor("the module's value", value, "output_index=0"));
        };
        let part = part.bind(self.py());
        let (around, last) = last_step(part)?;
        let inner = part_of(value, &around).map_err(|cause| self.no_part(value, part, cause))?;
        if let Some((hidden, residual)) = summed(&inner, &last) {
            // An addition to the sum changes only the hidden state.
            let adds = self.intervention.get().adds;
            let changed = tensor(&hidden, (!adds).then_some(&residual))?;
            let first = 0_usize.into_pyobject(self.py())?.into_any();
            return with_part(value, &around, &with_part(&inner, &first, &changed)?);
        }
        let found = part_of(&inner, &last).map_err(|cause| self.no_part(value, part, cause))?;
        if !torch::is_tensor(&found)? {
            let what = format!("output_index {} of the module's value", repr(part));
            return Err(self.no_tensor(&what, &found, "a path, such as output_index=(1, 0)"));
        }
        with_part(value, part, &tensor(&found, None)?)
    }

    /// Changes the gradients of a module's values, a tuple: the only one, or the one that
    /// `output_index` names in the tuple, unless autograd computes none for it.
    fn gradients(&self, gradients: &Bound<'py, PyAny>) -> Outcome<'py> {
        let part = self.intervention.get().part.as_ref();
        let all = gradients.cast::<PyTuple>().ok();
        let only = all.filter(|all| part.is_none() && all.len() == 1);
        let only = only.map(|all| all.get_item(0)).transpose()?;
        let value = only.as_ref().unwrap_or(gradients);
        let named = match part {
            Some(part) => part_of(value, part.bind(self.py())).ok(),
            None => only.clone(),
        };
        if named.is_some_and(|it| it.is_none()) {
            return Ok(None);
        }
        let changed = self.part_of(value, &|x, _| self.tensor(x, None))?;
        Ok(Some(match only {
            Some(_) => PyTuple::new(self.py(), [changed])?.into_any(),
            None => changed,
        }))
    }

    /// Returns the error of a value without the part.
    fn no_part(&self, value: &Bound<'py, PyAny>, part: &Bound<'py, PyAny>, cause: PyErr) -> PyErr {
        let message = format!(
            "{}: the module's value, a {}, has no output_index {}",
            (self.describe)(),
            type_name(value),
            repr(part)
        );
        caused(self.py(), selection_error(self.py(), message), cause)
    }

    /// Changes a tensor, in the extent.
    fn tensor(
        &self,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let changed = with_residual(x, residual, |x| self.everywhere(x));
        let changed = changed.map_err(|cause| self.lacking(x, cause))?;
        match self.extent {
            Some((extent, call)) => extent
                .of(self.describe, changed, x, call)
                .map_err(|cause| self.lacking(x, cause)),
            None => Ok(changed),
        }
    }

    /// Changes a tensor by the vector or the numbers of the intervention.
    pub fn everywhere(&self, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // Torch lacks operations of a nested tensor and a dense one, or their backward. One in the
        // layout `jagged` is of a subclass.
        if !Facts::is_plain(x)? && is_nested(x)? {
            return self.by_components(x);
        }
        match self.whole(x) {
            Err(cause) if !is_hook_error(self.py(), &cause) && is_nested(x)? => {
                self.by_components(x)
            }
            changed => changed,
        }
    }

    /// Changes a nested tensor.
    fn by_components(&self, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if self.intervention.get().has_rows {
            return Err(self.error(
                "a vector with rows does not fit a nested tensor: use a vector with one dimension",
            ));
        }
        map_dense(x, &mut |dense| self.whole(dense))
    }

    fn whole(&self, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let this = self.intervention.get();
        let numbers = this.numbers.bind(self.py());
        if this.dims.is_none() {
            if !numbers.is_empty() {
                self.check_dtype(x)?;
            }
            return self.by(x, numbers);
        }
        let mut vector = self.vector(x)?;
        if this.has_rows {
            vector = self.expanded(&vector, x)?;
        }
        if numbers.is_empty() {
            return invoke::call(this.formula.bind(self.py()), [x, &vector]);
        }
        let operands: Vec<_> = std::iter::once(vector).chain(numbers.iter()).collect();
        self.by(x, &PyTuple::new(self.py(), operands)?)
    }

    /// Changes a tensor by operands: the vector, then the numbers, each for all of `x` or with a row
    /// for each of it.
    pub fn by(
        &self,
        x: &Bound<'py, PyAny>,
        operands: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let formula = self.intervention.get().formula.bind(self.py());
        invoke::call_with_first(formula, x, operands, None)
    }

    /// Raises unless `x` has a dtype that numbers change.
    fn check_dtype(&self, x: &Bound<'py, PyAny>) -> PyResult<()> {
        let dtype = x.getattr(intern!(self.py(), "dtype"))?;
        if !Facts::is_float(&dtype)? {
            self.intervention
                .call_method1(intern!(self.py(), "_check_dtype"), (dtype,))?;
        }
        Ok(())
    }

    /// Returns a vector in the shape of `x`.
    fn expanded(
        &self,
        vector: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let expanded = vector.call_method1(intern!(py, "expand_as"), (x,));
        expanded.map_err(|cause| {
            if is_nested(x).unwrap_or(false) {
                return cause;
            }
            let shape = |tensor: &Bound<'py, PyAny>| -> Vec<usize> {
                let shape = tensor.getattr(intern!(py, "shape"));
                shape.and_then(|shape| shape.extract()).unwrap_or_default()
            };
            let error = self.error(format_args!(
                "its vector of shape {:?} does not broadcast to the module's value of shape {:?}",
                shape(vector),
                shape(x)
            ));
            caused(py, error, cause)
        })
    }

    /// Returns the vector as `x` takes it.
    pub fn vector(&self, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let this = self.intervention.get();
        if let Some(width) = this.width {
            // Half the time of a call of `size`.
            let shape = x.getattr(intern!(py, "shape"))?.cast_into::<PyTuple>()?;
            let last = shape.len().checked_sub(1);
            let of_x: Option<usize> = match last {
                Some(last) => Some(shape.get_borrowed_item(last)?.extract()?),
                None => None,
            };
            if of_x != Some(width) {
                return Err(self.error(format_args!(
                    "its vector has a width of {width}, but the module's value has {}",
                    of_x.map_or_else(|| "no dimension".to_owned(), |width| width.to_string())
                )));
            }
        }
        let dtype = x.getattr(intern!(py, "dtype"))?;
        let device = x.getattr(intern!(py, "device"))?;
        let known = this
            .casts
            .find(py, |(of, at)| Ok(of.is(&dtype) && at.bind(py).eq(&device)?))?;
        if let Some(vector) = known {
            return Ok(vector);
        }
        let method = intern!(py, "vector_as");
        let vector = self.intervention.call_method1(method, (&dtype, &device))?;
        if !this.trained {
            let key = (dtype.unbind(), device.unbind());
            this.casts.add(key, &vector)?;
        }
        Ok(vector)
    }

    /// Returns the error of an operation that the class of a tensor may lack.
    fn lacking(&self, x: &Bound<'py, PyAny>, cause: PyErr) -> PyErr {
        let py = self.py();
        let lacks = cause.is_instance_of::<PyTypeError>(py)
            || cause.is_instance_of::<PyAttributeError>(py)
            || cause.is_instance_of::<PyNotImplementedError>(py)
            || cause.is_instance_of::<PyValueError>(py);
        let plain = Facts::is_plain(x).unwrap_or(true);
        let of_dtype = plain && cause.is_instance_of::<PyNotImplementedError>(py);
        if !lacks || is_hook_error(py, &cause) || (plain && !of_dtype) {
            return cause;
        }
        let mut class = type_name(x);
        if of_dtype && let Ok(dtype) = x.getattr(intern!(py, "dtype")) {
            class = format!("{class} of {dtype}");
        }
        let error = self.error(format_args!(
            "a {class} does not support an operation that the intervention needs ({}): change it \
             with a function",
            type_name(cause.value(py)),
        ));
        caused(py, error, cause)
    }

    /// Returns the error of a value that is no tensor; `option` chooses one in it.
    fn no_tensor(&self, what: &str, value: &Bound<'py, PyAny>, option: &str) -> PyErr {
        self.error(format_args!(
            "{what} is a {}: choose a tensor in it with {option}",
            type_name(value)
        ))
    }

    pub fn error(&self, message: impl Display) -> PyErr {
        hook_type_error(self.py(), format!("{}: {message}", (self.describe)()))
    }
}
