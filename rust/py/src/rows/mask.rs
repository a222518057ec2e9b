//! Tokens at positions, as a mask of the first dimensions of tensors.

use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;

use crate::error::hook_type_error;
use crate::rows::matrix::{CallArguments, Padded};
use crate::rows::places::{MemberPlace, TokenPlace};
use crate::torch::copies::Copies;
use crate::torch::nested::is_nested;
use crate::torch::tensors::host_tensor;

const UNPROVED: &str = ". The number of rows matches, but the module took no tensor of shape \
                        (batch, length, ...) and no view of one, which would show that the rows \
                        are the tokens in order. Name a module that did. In inference mode torch \
                        does not report views: use torch.no_grad";

/// Mask of the tokens of a forward, (batch, length) or (1, ..., rows), for all of its calls.
pub struct Mask {
    /// Tensor of bools.
    bools: Py<PyAny>,
    /// The same on the host, once it has waited for a GPU.
    on_host: OnceLock<Py<PyAny>>,
    /// True if all of them are true, as far as the host knows.
    all: bool,
    on_devices: Copies,
    /// Places of the tokens where it is true, in the order of memory.
    places: Copies,
}

impl Mask {
    pub fn of(bools: &Bound<'_, PyAny>) -> Self {
        Self {
            bools: bools.clone().unbind(),
            on_host: OnceLock::new(),
            all: false,
            on_devices: Copies::default(),
            places: Copies::default(),
        }
    }

    /// Makes a mask; None if it is of no token. A GPU is not asked, which the host would wait for.
    pub fn of_any(bools: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = bools.py();
        if !bools.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            return Ok(Some(Self::of(bools)));
        }
        if !bools.call_method0(intern!(py, "any"))?.is_truthy()? {
            return Ok(None);
        }
        let all = bools.call_method0(intern!(py, "all"))?.is_truthy()?;
        Ok(Some(Self {
            all,
            ..Self::of(bools)
        }))
    }

    /// Makes the mask of some of the tokens that a shape has, in the order of memory.
    pub fn of_places(py: Python<'_>, places: &[TokenPlace], shape: &[usize]) -> PyResult<Self> {
        let mut bools = vec![false; shape.iter().product()];
        for place in places {
            bools[place.0] = true;
        }
        let all = places.len() == bools.len();
        let mask = host_tensor(py, bools, "bool")?;
        let mask = mask.call_method1(intern!(py, "reshape"), (shape.to_vec(),))?;
        Ok(Self {
            all,
            ..Self::of(&mask)
        })
    }

    /// Returns the mask of other rows, of one dimension: those with these places among its own.
    pub fn at(&self, py: Python<'_>, places: &[MemberPlace]) -> PyResult<Option<Self>> {
        let rows: Vec<_> = places.iter().map(|place| place.0).collect();
        Self::of_any(&self.bools.bind(py).get_item(rows)?)
    }

    /// Returns the mask of the tokens as the rows of a matrix.
    pub fn flat(&self, py: Python<'_>) -> PyResult<Self> {
        let bools = self.bools.bind(py);
        Ok(Self {
            all: self.all,
            ..Self::of(&bools.call_method0(intern!(py, "flatten"))?)
        })
    }

    /// Places of the tokens, as a tensor where the mask is, or on the host.
    fn nonzero<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let flatten = intern!(py, "flatten");
        let bools = self.on_host.get().unwrap_or(&self.bools).bind(py);
        let flat = bools.call_method0(flatten)?;
        flat.call_method0(intern!(py, "nonzero"))?
            .call_method0(flatten)
    }

    /// Returns the places of the tokens.
    pub fn places(&self, py: Python<'_>) -> PyResult<Vec<TokenPlace>> {
        if self.all {
            let count = self.bools.bind(py).call_method0(intern!(py, "numel"))?;
            return Ok((0..count.extract()?).map(TokenPlace).collect());
        }
        let places = self.nonzero(py)?;
        let places: Vec<usize> = places.call_method0(intern!(py, "tolist"))?.extract()?;
        Ok(places.into_iter().map(TokenPlace).collect())
    }

    /// Returns the row and the position of each token, of (batch, length); `positions`: of all tokens.
    pub fn tokens(&self, positions: &Bound<'_, PyAny>) -> PyResult<(Vec<usize>, Vec<i64>)> {
        let py = positions.py();
        let tolist = intern!(py, "tolist");
        let (bools, positions) = self.with_host(positions)?;
        let rows = bools.call_method0(intern!(py, "nonzero"))?;
        let rows = rows.call_method1(intern!(py, "select"), (1, 0))?;
        let values = positions.get_item(bools)?;
        let rows = rows.call_method0(tolist)?.extract()?;
        Ok((rows, values.call_method0(tolist)?.extract()?))
    }

    /// Returns the mask and `positions`, of its shape, on the host.
    fn with_host<'py>(
        &self,
        positions: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let py = positions.py();
        let bools = self.bools.bind(py);
        if bools.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            return Ok((bools.clone(), positions.clone()));
        }
        // One copy of both: the host waits for a GPU.
        let torch = py.import(intern!(py, "torch"))?;
        let both = bools.call_method1(intern!(py, "to"), (positions,))?;
        let both = torch.call_method1(intern!(py, "stack"), ((both, positions),))?;
        let both = both.call_method0(intern!(py, "cpu"))?;
        let bools = both.get_item(0)?.call_method0(intern!(py, "bool"))?;
        // Another thread may have been first, with an equal copy.
        let _ = self.on_host.set(bools.clone().unbind());
        Ok((bools, both.get_item(1)?))
    }

    /// Takes the tokens of a tensor, with one dimension in place of the mask's: a copy, unless
    /// all tokens are taken.
    pub fn take<'py>(
        &self,
        describe: &dyn Fn() -> String,
        tensor: &Bound<'py, PyAny>,
        call: Option<CallArguments<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let dims = self.dims_of(describe, tensor, call)?;
        let last = dims.saturating_sub(1);
        let flat = tensor.call_method1(intern!(py, "flatten"), (0, last))?;
        if self.all {
            return Ok(flat);
        }
        let places = self.places.on_device_of(tensor, || self.nonzero(py))?;
        flat.call_method1(intern!(py, "index_select"), (0, places))
    }

    /// Returns the places of the tokens among the rows of a tensor, as a tensor on its device.
    pub fn places_in<'py>(
        &self,
        describe: &dyn Fn() -> String,
        tensor: &Bound<'py, PyAny>,
        call: Option<CallArguments<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.dims_of(describe, tensor, call)?;
        self.places
            .on_device_of(tensor, || self.nonzero(tensor.py()))
    }

    /// Takes the tokens of `changed`, and the others of `x`.
    pub fn merge<'py>(
        &self,
        describe: &dyn Fn() -> String,
        changed: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        call: Option<CallArguments<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let dims = self.dims_of(describe, x, call)?;
        if self.all {
            return Ok(changed.clone());
        }
        let bools = || Ok(self.bools.bind(py).clone());
        let mask = self.on_devices.on_device_of(x, bools)?;
        let mask = broadcast(mask, x, dims)?;
        changed.call_method1(intern!(py, "where"), (mask, x))
    }

    /// Returns a number for each token in the shape in which it broadcasts to `x`; `numbers`: of the
    /// mask's own tokens, in order.
    pub fn spread<'py>(
        &self,
        describe: &dyn Fn() -> String,
        numbers: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        call: Option<CallArguments<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let dims = self.dims_of(describe, x, call)?;
        let bools = self
            .bools
            .bind(py)
            .call_method1(intern!(py, "to"), (x.getattr(intern!(py, "device"))?,))?;
        let numbers = numbers.call_method1(intern!(py, "to"), (x,))?;
        let shape = bools.getattr(intern!(py, "shape"))?;
        let zeros = numbers.call_method1(intern!(py, "new_zeros"), (shape,))?;
        let spread = zeros.call_method1(intern!(py, "masked_scatter"), (bools, numbers))?;
        broadcast(spread, x, dims)
    }

    /// Returns a mask of the tokens for which `acts` is true. It has a value for each token of this
    /// mask, in order; at least one is true and not all.
    pub fn refined(&self, py: Python<'_>, acts: Vec<bool>) -> PyResult<Self> {
        let bools = self.bools.bind(py);
        let device = bools.getattr(intern!(py, "device"))?;
        let acts = host_tensor(py, acts, "bool")?.call_method1(intern!(py, "to"), (device,))?;
        let refined = bools.call_method1(intern!(py, "masked_scatter"), (bools, acts))?;
        Ok(Self::of(&refined))
    }

    /// Returns how many leading dimensions of a tensor index tokens: the mask's own, or one for a
    /// matrix with a row for each token, as `call` shows.
    fn dims_of<'py>(
        &self,
        describe: &dyn Fn() -> String,
        x: &Bound<'py, PyAny>,
        call: Option<CallArguments<'_, 'py>>,
    ) -> PyResult<usize> {
        let py = x.py();
        let shape = |tensor: &Bound<'_, PyAny>| -> PyResult<Vec<usize>> {
            tensor.getattr(intern!(py, "shape"))?.extract()
        };
        if is_nested(x)? {
            let message = format!(
                "{}: the tokens at positions cannot be found in a nested tensor: leave out at=",
                describe(),
            );
            return Err(hook_type_error(py, message));
        }
        let (of_x, of_mask) = (shape(x)?, shape(self.bools.bind(py))?);
        if of_x.starts_with(&of_mask) {
            return Ok(of_mask.len());
        }
        let mut hint = "";
        if let [rows, columns] = *of_mask {
            let tokens = Padded { rows, columns };
            if tokens.may_be_rows_of(x)? {
                if call.is_some_and(|call| call.have(tokens).unwrap_or(false)) {
                    return Ok(1);
                }
                hint = UNPROVED;
            }
        }
        let message = format!(
            "{}: positions are known for {of_mask:?} tokens (batch, length), but the module's \
             value has shape {of_x:?}{hint}",
            describe(),
        );
        Err(hook_type_error(py, message))
    }
}

/// Returns a tensor of a mask's shape with the dimensions of `x`, of which the first `dims` index tokens.
fn broadcast<'py>(
    tensor: Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    dims: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let mut shaped = tensor;
    if dims == 1 {
        shaped = shaped.call_method0(intern!(py, "flatten"))?;
    }
    let of_x: usize = x.call_method0(intern!(py, "dim"))?.extract()?;
    for _ in dims..of_x {
        shaped = shaped.call_method1(intern!(py, "unsqueeze"), (-1,))?;
    }
    Ok(shaped)
}
