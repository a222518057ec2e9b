//! Interventions as native hooks, for one call or for many members of a batch. Members share one
//! operation, with a table of vectors and the index in it of each row.

use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::effects::intervention::{Change, InterventionBase, Table, with_residual};
use crate::error::type_name;
use crate::hooks::native::{Extension, Native, Outcome, Trace, Traced, Turn};
use crate::rows::calls::merging::{
    InBatch, Joint, Joints, MergedPart, MergedResult, Merging, Select, SharedValue, groups,
    in_batch, same_part,
};
use crate::rows::numbers::Selection;
use crate::torch;
use crate::torch::facts::Facts;
use crate::torch::made::StreamOrder;
use ferrohook_core::Phase;

/// Number of tables that an intervention keeps, for the batches that begin with it.
const MOST_TABLES: usize = 4;

/// Adds a table, and returns the one that it replaces.
fn push(tables: &mut Vec<Table>, table: Table) -> Option<Table> {
    let oldest = (tables.len() == MOST_TABLES).then(|| tables.remove(0));
    tables.push(table);
    oldest
}

/// Returns a table in the shape in which its rows broadcast to those of `x`, in dimension `dim`.
fn spread<'py>(
    table: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    dim: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let dims: usize = x.call_method0(intern!(py, "dim"))?.extract()?;
    let between = dims - dim - 2;
    if between == 0 {
        return Ok(table.clone());
    }
    let [rows, width]: [usize; 2] = table.getattr(intern!(py, "shape"))?.extract()?;
    let shape = std::iter::once(rows).chain(std::iter::repeat_n(1, between));
    let shape = PyTuple::new(py, shape.chain([width]).collect::<Vec<_>>())?;
    table.call_method1(intern!(py, "view"), (shape,))
}

/// Interventions of some members, of one kind and on the same part of a value.
pub struct InterventionGroup {
    /// Number of the part of each.
    pub parts: Vec<usize>,
    hooks: Vec<Py<InterventionBase>>,
    /// Numbers of the interventions.
    key: Box<[u64]>,
    selection: Arc<Selection>,
}

/// True if interventions are of one kind, on the same part of a value, with one reader if any, and all
/// or none complex.
fn alike(
    first: &Bound<'_, InterventionBase>,
    second: &Bound<'_, InterventionBase>,
) -> PyResult<bool> {
    let (this, other) = (first.get(), second.get());
    let same = same_part(first.py(), this.part.as_ref(), other.part.as_ref())?;
    let kind = first.get_type().is(second.get_type());
    let reader = match (&this.reader, &other.reader) {
        (Some(one), Some(another)) => one.is(another),
        (one, another) => one.is_none() && another.is_none(),
    };
    Ok(same && kind && reader && this.complex == other.complex)
}

/// True for a tensor of floating point or complex numbers.
fn has_fractions(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let floats = tensor.call_method0(intern!(py, "is_floating_point"))?;
    Ok(floats.is_truthy()?
        || tensor
            .call_method0(intern!(py, "is_complex"))?
            .is_truthy()?)
}

impl Joint for InterventionGroup {
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()> {
        merged.value = Some(self.apply(shared, merged.now(shared), None)?);
        Ok(())
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hooks.iter().try_for_each(|hook| visit.call(hook))
    }
}

/// Blends changed rows of a tensor with the former ones.
pub type BlendRows<'a, 'py> =
    dyn Fn(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> + 'a;

impl InterventionGroup {
    /// Groups interventions that are alike.
    pub fn all(parts: &[MergedPart<'_, '_>], select: &Select<'_>) -> PyResult<Vec<Self>> {
        let groups = groups(parts, alike)?.into_iter().map(|group| {
            let hooks = group.iter().map(|number| parts[*number].hook.cast());
            let hooks: Vec<&Bound<'_, InterventionBase>> = hooks.collect::<Result<_, _>>()?;
            Ok(Self {
                key: hooks.iter().map(|hook| hook.get().number).collect(),
                hooks: hooks.into_iter().map(|it| it.clone().unbind()).collect(),
                selection: select.rows(parts, &group),
                parts: group,
            })
        });
        groups.collect()
    }

    /// Applies the interventions to their rows of a value, changed by `blend` if there is one.
    pub fn apply<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        value: &Bound<'py, PyAny>,
        blend: Option<&BlendRows<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let first = self.hooks[0].bind(value.py());
        if first.get().part.is_some() && torch::is_tensor(value)? {
            // An index into a tensor counts the rows of each member, so each runs separately.
            return Err(PyIndexError::new_err("an index of a tensor"));
        }
        let change = Change {
            intervention: first,
            describe: &|| (shared.describe)(self.parts[0]),
            extent: None,
        };
        change.part_of(value, &|x, residual| {
            self.rows(&change, shared, x, residual, blend)
        })
    }

    /// Applies each intervention to its rows of a tensor.
    fn rows<'py>(
        &self,
        change: &Change<'_, 'py>,
        shared: &SharedValue<'_, 'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        blend: Option<&BlendRows<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        for tensor in residual.into_iter().chain([x]) {
            let dims: usize = tensor.call_method0(intern!(py, "dim"))?.extract()?;
            if !shared.layout.covers(tensor)?
                || dims < shared.layout.dim + 2
                || !has_fractions(tensor)?
            {
                return Err(change.error(format_args!(
                    "a {} has no rows to change",
                    type_name(tensor)
                )));
            }
        }
        let changed = |x: &_, residual: Option<&_>| {
            let of_rows = |x: &Bound<'py, PyAny>| self.of_rows(change, x, shared.layout.dim);
            let changed = with_residual(x, residual, of_rows)?;
            blend.map_or(Ok(changed.clone()), |blend| blend(&changed, x))
        };
        let rows = &self.selection.rows;
        if rows.all(shared.layout.size) {
            return changed(x, residual);
        }
        let narrow = |tensor| rows.narrow(tensor, shared.layout.dim);
        let changed = changed(&narrow(x)?, residual.map(narrow).transpose()?.as_ref())?;
        let copy = x.call_method0(intern!(py, "clone"))?;
        rows.write(&copy, shared.layout.dim, &changed)?;
        Ok(copy)
    }

    /// Applies each intervention to its rows, in the order of the selection.
    fn of_rows<'py>(
        &self,
        change: &Change<'_, 'py>,
        x: &Bound<'py, PyAny>,
        dim: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let this = change.intervention.get();
        let operands = this.dims.is_some() || !this.numbers.bind(py).is_empty();
        if self.hooks.len() == 1 || !operands {
            return change.everywhere(x);
        }
        if this.reader.is_some() {
            change.vector(x)?; // checks the dtype
            let hooks = PyList::new(py, &self.hooks)?;
            let members = self.selection.members.as_ref();
            let members = members.map(|it| it.on_device_of(x)).transpose()?;
            let arguments = (x, hooks, members, dim);
            return change
                .intervention
                .call_method1(intern!(py, "_together"), arguments);
        }
        let tables = self.tables(change, x)?;
        let changed = self.by_rows(change, x, &tables, dim)?;
        if this.dims.is_some() {
            return Ok(changed);
        }
        // Without a vector the numbers may be of a wider dtype.
        let dtype = x.getattr(intern!(py, "dtype"))?;
        changed.call_method1(intern!(py, "to"), (dtype,))
    }

    /// Changes the rows of each member by its row of the tables.
    fn by_rows<'py>(
        &self,
        change: &Change<'_, 'py>,
        x: &Bound<'py, PyAny>,
        tables: &Bound<'py, PyTuple>,
        dim: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = x.py();
        let spread_to = |x: &Bound<'py, PyAny>, tables: Vec<Bound<'py, PyAny>>| {
            let spread = tables.iter().map(|table| spread(table, x, dim));
            PyTuple::new(py, spread.collect::<PyResult<Vec<_>>>()?)
        };
        let tables: Vec<_> = tables.iter().collect();
        let Some(members) = &self.selection.members else {
            return change.by(x, &spread_to(x, tables)?);
        };
        // As large as the tensor, unless all members have as many rows.
        if let Some(each) = self.selection.each
            && Facts::is_plain(x)?
        {
            let lengths = (self.hooks.len(), each);
            let x = x.call_method1(intern!(py, "unflatten"), (dim, lengths))?;
            let changed = change.by(&x, &spread_to(&x, tables)?)?;
            return changed.call_method1(intern!(py, "flatten"), (dim, dim + 1));
        }
        let members = members.on_device_of(x)?;
        let of_rows = |table: &Bound<'py, PyAny>| {
            table.call_method1(intern!(py, "index_select"), (0, &members))
        };
        let rows = tables.iter().map(of_rows).collect::<PyResult<_>>()?;
        change.by(x, &spread_to(x, rows)?)
    }

    /// Returns the tables of the interventions, as `x` takes them.
    fn tables<'py>(
        &self,
        change: &Change<'_, 'py>,
        x: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = x.py();
        let first = change.intervention;
        let this = first.get();
        let dtype = x.getattr(intern!(py, "dtype"))?;
        let device = x.getattr(intern!(py, "device"))?;
        let known = |table: &&Table| table.key == self.key && table.dtype.is(&dtype);
        let of_table = |table: &Table| {
            let order = table.order.clone_ref(py);
            (
                table.device.clone_ref(py),
                table.tensors.clone_ref(py),
                order,
            )
        };
        let found: Vec<_> = this
            .tables
            .lock()
            .iter()
            .filter(known)
            .map(of_table)
            .collect();
        // Compared without the lock: a device may be of Python.
        for (of, tensors, order) in found {
            if of.bind(py).eq(&device)? {
                order.begin_use(py)?;
                return Ok(tensors.into_bound(py));
            }
        }
        let vectors = PyList::empty(py);
        if this.dims.is_some() {
            for hook in &self.hooks {
                let change = Change {
                    intervention: hook.bind(py),
                    ..*change
                };
                vectors.append(change.vector(x)?)?;
            }
        }
        let columns = PyList::empty(py);
        for place in 0..this.numbers.bind(py).len() {
            let column = self.hooks.iter().map(|hook| {
                let numbers = hook.get().numbers.bind(py);
                numbers.get_borrowed_item(place)
            });
            columns.append(PyList::new(py, column.collect::<PyResult<Vec<_>>>()?)?)?;
        }
        let arguments = (vectors, columns, &dtype, &device);
        let tensors = first.call_method1(intern!(py, "_tables"), arguments)?;
        let tensors = tensors.cast_into::<PyTuple>()?;
        if let Some(order) = StreamOrder::of(&tensors)? {
            let table = Table {
                key: self.key.clone(),
                dtype: dtype.unbind(),
                device: device.unbind(),
                tensors: tensors.clone().unbind(),
                order,
            };
            let _oldest = push(&mut this.tables.lock(), table);
        }
        Ok(tensors)
    }
}

impl Native for InterventionBase {
    fn native_in(&self, phase: Phase) -> bool {
        // Autograd has no gradient of the sum of two outputs.
        !self.sums || matches!(phase, Phase::ForwardPre | Phase::Forward)
    }

    fn changes(&self) -> bool {
        true
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        Self::run_in(object.cast()?, turn, None)
    }

    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        if !self.traces {
            return Ok(Some(Traced::breaking(object.clone())));
        }
        let form = Self::traced_form(object.cast()?)?;
        Ok(Some(Traced {
            kind: "intervention",
            ..Traced::plain(form.into_any(), false)
        }))
    }
}

impl InBatch for InterventionBase {
    fn merges<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        _phase: Phase,
        _owner: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Merging>> {
        // A vector that broadcasts otherwise, or that is trained, changes the rows of each member separately.
        let row = self.reader.is_some()
            || self
                .dims
                .is_none_or(|dims| dims == 1 && self.width.is_some());
        Ok((row && !self.trained).then(|| Merging {
            hook: object.clone().unbind(),
            at: None,
            lasts: true,
        }))
    }

    fn check_parts<'py>(
        &self,
        parts: &[MergedPart<'_, 'py>],
        value: &Bound<'py, PyAny>,
        describe: &dyn Fn(usize) -> String,
    ) -> PyResult<Vec<(usize, PyErr)>> {
        let py = value.py();
        // Width of a tensor of floating point that is the value itself.
        let mut width = None;
        if torch::is_tensor(value)?
            && value
                .call_method0(intern!(py, "is_floating_point"))?
                .is_truthy()?
        {
            let size = value.call_method1(intern!(py, "size"), (-1,));
            width = size.and_then(|size| size.extract()).ok();
        }
        let mut failed = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let intervention = part.hook.cast::<Self>()?;
            let this = intervention.get();
            if this.part.is_none()
                && !this.complex
                && width.is_some()
                && (this.width.is_none() || this.width == width)
            {
                continue;
            }
            let change = Change {
                intervention,
                describe: &|| describe(number),
                extent: None,
            };
            let checked = change.part_of(value, &|x, _residual| {
                if this.dims.is_some() {
                    change.vector(x)?;
                }
                Ok(x.clone())
            });
            if let Err(error) = checked {
                failed.push((number, error));
            }
        }
        Ok(failed)
    }

    fn join(&self, parts: &[MergedPart<'_, '_>], select: &Select<'_>) -> PyResult<Joints> {
        let groups = InterventionGroup::all(parts, select)?.into_iter();
        Ok(groups.map(|it| Box::new(it) as Box<dyn Joint>).collect())
    }
}
