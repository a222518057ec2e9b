//! A kind of native hook that runs for many members of a batch at once, written in one file.

use std::sync::atomic::{AtomicUsize, Ordering};

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::hooks::native::{Extension, Native, NativeHook, Outcome, Trace, Turn};
use crate::rows::calls::merging::{
    InBatch, Joint, Joints, MergedPart, MergedResult, Merging, Select, SharedValue, in_batch,
};
use crate::rows::numbers::Rows;

/// Hook that doubles a tensor.
#[pyclass(frozen, extends = NativeHook)]
struct Double;

/// Runs of it for one member, and for several at once.
static ALONE: AtomicUsize = AtomicUsize::new(0);
static TOGETHER: AtomicUsize = AtomicUsize::new(0);

#[pymethods]
impl Double {
    #[new]
    fn new() -> (Self, NativeHook) {
        (Self, NativeHook::of::<Self>())
    }
}

impl Native for Double {
    fn changes(&self) -> bool {
        true
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    fn run<'py>(&self, _object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        ALONE.fetch_add(1, Ordering::Relaxed);
        turn.value.mul(2).map(Some)
    }

    fn traced<'py>(&self, _object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        Ok(None)
    }
}

impl InBatch for Double {
    fn merges(
        &self,
        object: &Bound<'_, PyAny>,
        _phase: Phase,
        _owner: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Merging>> {
        Ok(Some(Merging {
            hook: object.clone().unbind(),
            at: None,
            lasts: true,
        }))
    }

    fn join(&self, parts: &[MergedPart<'_, '_>], _select: &Select<'_>) -> PyResult<Joints> {
        let rows = parts.iter().map(|part| part.rows.clone().into_owned());
        Ok(vec![Box::new(Doubles(rows.collect()))])
    }
}

/// Rows that are doubled, of each member.
struct Doubles(Vec<Rows>);

impl Joint for Doubles {
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()> {
        TOGETHER.fetch_add(1, Ordering::Relaxed);
        let now = merged.now(shared);
        let value = now.call_method0(intern!(now.py(), "clone"))?;
        for rows in &self.0 {
            let own = rows.narrow(&value, shared.layout.dim)?;
            rows.write(&value, shared.layout.dim, &own.mul(2)?)?;
        }
        merged.value = Some(value);
        Ok(())
    }

    fn traverse(&self, _visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        Ok(())
    }
}

/// Two members double before they add, one adds before.
#[test]
fn another_kind_of_hook_merges() -> PyResult<()> {
    Python::initialize();
    Python::attach(|py| {
        let core = pyo3::wrap_pymodule!(crate::_core)(py);
        let modules = py.import("sys")?.getattr("modules")?;
        modules.set_item("ferrohook._core", core)?;
        let names = PyDict::new(py);
        names.set_item("Double", py.get_type::<Double>())?;
        py.run(
            c"
import ferrohook as fh, torch

double, add = Double(), fh.Add(torch.ones(2))
model, x = torch.nn.Identity(), torch.randn(4, 2)
plans = [(double, add), (double, add), (add, double)]
plans = [fh.Plan(*(fh.on('', hook) for hook in hooks)).prepare(model) for hooks in plans]
with fh.batch({plan.open(): row for row, plan in enumerate(plans)}, size=4):
    y = model(x)
assert torch.equal(y, torch.stack([x[0] * 2 + 1, x[1] * 2 + 1, (x[2] + 1) * 2, x[3]])), (x, y)
",
            Some(&names),
            None,
        )
    })?;
    assert_eq!(ALONE.load(Ordering::Relaxed), 0);
    assert!((1..=2).contains(&TOGETHER.load(Ordering::Relaxed)));
    Ok(())
}
