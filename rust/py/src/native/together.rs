//! Interventions of many members of a batch as one operation: a table of vectors, and the place in
//! it of each row.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::torch::rows::Selection;

/// Tensors with a row for each of some interventions, as tensors of one dtype and device take them.
pub struct Table {
    /// Numbers of the interventions.
    pub key: Box<[u64]>,
    pub dtype: Py<PyAny>,
    pub device: Py<PyAny>,
    pub tensors: Py<PyTuple>,
}

/// Number of tables that an intervention keeps, for the batches that begin with it.
const MOST_TABLES: usize = 4;

/// Adds a table, and returns the one that it replaces.
pub fn push(tables: &mut Vec<Table>, table: Table) -> Option<Table> {
    let oldest = (tables.len() == MOST_TABLES).then(|| tables.remove(0));
    tables.push(table);
    oldest
}

/// Returns the row of the table for each row of the selection, in the shape that `x` takes.
pub fn spread<'py>(
    table: &Bound<'py, PyAny>,
    selection: &Selection,
    x: &Bound<'py, PyAny>,
    dim: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let dims: usize = x.call_method0(intern!(py, "dim"))?.extract()?;
    let mut rows = table.clone();
    if let Some(places) = &selection.places {
        let places = places.on_device_of(x)?;
        rows = rows.call_method1(intern!(py, "index_select"), (0, places))?;
    }
    let between = dims - dim - 2;
    if between == 0 {
        return Ok(rows);
    }
    let width: usize = table.call_method1(intern!(py, "size"), (1,))?.extract()?;
    let shape = PyList::new(py, [selection.rows.len()])?;
    for length in std::iter::repeat_n(1, between).chain([width]) {
        shape.append(length)?;
    }
    rows.call_method1(intern!(py, "view"), (shape,))
}
