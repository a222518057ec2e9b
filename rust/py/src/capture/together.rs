//! Recorders as native hooks, for one call or for many members of a batch. Members share one stored
//! value, a reference or a selection of rows; each reads its own rows of it.

use std::sync::Arc;

use ferrohook_core::Phase;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;

use crate::capture::collector::Collector;
use crate::capture::keeping::record;
use crate::capture::recorder::Recorder;
use crate::capture::store::{Kept, KeptRows, KeptTensor};
use crate::hooks::native::{Extension, Native, Outcome, Trace, Traced, Turn};
use crate::rows::calls::merging::{
    InBatch, Joint, Joints, MergedPart, MergedResult, Merging, Select, SharedValue, groups,
    in_batch, same_part, whole_part_of,
};
use crate::rows::numbers::{Rows, Selection};
use crate::rows::places::TokenPositions;
use crate::torch::made::StreamOrder;
use crate::torch::tensors::{any_tensor, map_tensors, requires_grad, version_if_any};

/// Recorders of some members, of the same part of a value.
struct CaptureGroup {
    /// Number of the part of each, itself, and its rows.
    recorders: Vec<(usize, Py<Recorder>, Rows)>,
    /// True if they store copies.
    clones: bool,
    selection: Arc<Selection>,
}

fn clones(recorder: &Bound<'_, Recorder>) -> bool {
    recorder.get().source.collector.get().clones()
}

/// True if they record the same part of a value in the same way.
fn alike(first: &Bound<'_, Recorder>, second: &Bound<'_, Recorder>) -> PyResult<bool> {
    let parts = [first, second].map(|it| it.get().part.as_ref());
    let same = same_part(first.py(), parts[0], parts[1])?;
    Ok(same && clones(first) == clones(second))
}

impl Joint for CaptureGroup {
    /// Stores the rows of each.
    fn run<'py>(
        &self,
        shared: &SharedValue<'_, 'py>,
        merged: &mut MergedResult<'py>,
    ) -> PyResult<()> {
        let py = shared.value.py();
        let (_, first, _) = &self.recorders[0];
        let part = match &first.get().part {
            Some(part) => whole_part_of(shared.value, part.bind(py)),
            None => Ok(shared.value.clone()),
        };
        let mut together = None;
        let mut start = 0;
        for (number, recorder, rows) in &self.recorders {
            let this = recorder.get();
            let mut store = || {
                let owner = (shared.owner)(*number);
                let collector = this.source.of_owner(py, Some(&owner))?;
                let positions = (shared.positions)(*number);
                if positions.as_ref().is_some_and(|it| !it.has_tokens()) {
                    return Ok(());
                }
                let all = &self.selection.rows;
                // The bytes that it keeps alive are counted: a copy of these rows only. Where the
                // members differ, or lack the part, each gets its own error.
                if let Ok(part) = &part
                    && !collector.get().counts()
                    && let Ok(stored) = together
                        .get_or_insert_with(|| MemberCapture::of(all, shared, part, self.clones))
                {
                    let kept =
                        stored.of_member(&collector, rows, start, shared.layout.dim, positions);
                    return collector.get().store(py, this.index, kept);
                }
                let own = this.part_of(&own_rows(rows, shared, shared.value)?)?;
                record(&collector, this.index, &own, positions, true).map(drop)
            };
            if let Err(error) = store() {
                merged.failed.push((*number, error));
            }
            start += rows.len();
        }
        Ok(())
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let mut recorders = self.recorders.iter();
        recorders.try_for_each(|(_, recorder, _)| visit.call(recorder))
    }
}

/// Returns a member's rows of a value: a copy where a member may write to the value in place.
fn own_rows<'py>(
    rows: &Rows,
    shared: &SharedValue<'_, 'py>,
    value: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    map_tensors(value, &mut |tensor| {
        let dim = shared.layout.dim;
        match (shared.layout.covers(tensor)?, shared.written) {
            (true, true) => rows.copy(tensor, dim),
            (true, false) => rows.narrow(tensor, dim),
            (false, true) => tensor.call_method0(intern!(tensor.py(), "clone")),
            (false, false) => Ok(tensor.clone()),
        }
    })
}

/// A value as the members share it.
struct MemberCapture<'py> {
    value: Bound<'py, PyAny>,
    tensors: Vec<(Bound<'py, PyAny>, Option<i64>)>,
    /// True if it is a selection of the members' rows, one member after the other.
    selected: bool,
    size: usize,
    /// True for each tensor that has rows of the batch.
    covered: Arc<[bool]>,
}

impl<'py> MemberCapture<'py> {
    /// Takes rows from a value; `copy`: a copy of them in any case.
    fn of(
        rows: &Rows,
        shared: &SharedValue<'_, 'py>,
        value: &Bound<'py, PyAny>,
        copy: bool,
    ) -> PyResult<Self> {
        // A reference to a tensor most of which is of others would keep that alive.
        let mut selected = copy || shared.written || 2 * rows.len() < shared.layout.size;
        let mut tensors = Vec::new();
        selected |= any_tensor(value, &mut |it| Ok(version_if_any(it)?.is_none()))?;
        let mut having = Vec::new();
        let value = map_tensors(value, &mut |tensor| {
            let py = tensor.py();
            let mut kept = tensor.clone();
            if requires_grad(tensor)? {
                kept = kept.call_method0(intern!(py, "detach"))?;
            }
            let covered = shared.layout.covers(tensor)?;
            having.push(covered);
            if selected && covered && !rows.all(shared.layout.size) {
                kept = rows.narrow(&kept, shared.layout.dim)?;
            }
            if selected && !(covered && rows.copies()) {
                kept = kept.call_method0(intern!(py, "clone"))?;
            }
            tensors.push((kept.clone(), version_if_any(&kept)?));
            Ok(kept)
        })?;
        let size = if selected {
            rows.len()
        } else {
            shared.layout.size
        };
        Ok(Self {
            value,
            tensors,
            selected,
            size,
            covered: having.into(),
        })
    }

    /// Returns the rows of a member, which start `start` rows after the first member's.
    fn of_member(
        &self,
        collector: &Bound<'py, Collector>,
        rows: &Rows,
        start: usize,
        dim: usize,
        positions: Option<TokenPositions>,
    ) -> Kept {
        let checks = collector.get().checks();
        let length = rows.len();
        let rows = if self.selected {
            Rows::Range { start, length }
        } else {
            rows.clone()
        };
        let tensors = self.tensors.iter().map(|(tensor, version)| KeptTensor {
            value: tensor.clone().unbind(),
            version: version.filter(|_| checks),
            gradient: None,
            recorded: false,
            order: StreamOrder::Any,
        });
        Kept {
            serial: 0, // for gradients, which a request in a batch has none of
            value: self.value.clone().unbind(),
            tensors: tensors.collect(),
            bytes: 0, // not counted
            shared: true,
            rows: Some(KeptRows {
                rows,
                dim,
                size: self.size,
                covered: Arc::clone(&self.covered),
            }),
            positions,
        }
    }
}

impl Native for Recorder {
    fn phase(&self) -> Option<Phase> {
        Some(Self::phase_of(self.inputs))
    }

    fn run<'py>(&self, _object: &Bound<'py, PyAny>, turn: &Turn<'_, 'py>) -> Outcome<'py> {
        let stored = self.record(turn.owner, turn.value, Some(turn))?;
        if let (Some(again), Some(stored)) = (turn.again, stored)
            && let Some(repeat) = self.again(stored)?
        {
            again(repeat);
        }
        Ok(None)
    }

    fn operator(&self) -> bool {
        true
    }

    fn needs_gradients(&self) -> bool {
        self.source.collector.get().keeps_gradients()
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(in_batch::<Self>())
    }

    /// Traces the operator of the recorded part, which is the same for every capture.
    fn traced<'py>(&self, object: &Bound<'py, PyAny>, _phase: Phase) -> Trace<'py> {
        let py = object.py();
        let key = self.key(py)?;
        let callback = (&self.part, &key).into_pyobject(py)?;
        Ok(Some(Traced {
            kind: "recorder",
            faithful: self.source.collector.get().records_in_graph(),
            operator: Some(key),
            in_place: self.place.is_some(),
            ..Traced::plain(callback.into_any(), false)
        }))
    }
}

impl InBatch for Recorder {
    fn keeps(&self) -> bool {
        true
    }

    fn merges<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        _phase: Phase,
        owner: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Merging>> {
        if !self.source.collector.get().merges() {
            return Ok(None);
        }
        let at = self.source.places(owner)?;
        Ok(at.map(|at| Merging {
            hook: object.clone().unbind(),
            at,
            lasts: self.source.place.capture.is_some(),
        }))
    }

    fn join(&self, parts: &[MergedPart<'_, '_>], select: &Select<'_>) -> PyResult<Joints> {
        let groups = groups(parts, alike)?.into_iter().map(|group| {
            let mut recorders = Vec::with_capacity(group.len());
            for number in &group {
                let part = &parts[*number];
                let recorder = part.hook.cast::<Self>()?.clone().unbind();
                recorders.push((*number, recorder, (*part.rows).clone()));
            }
            Ok(Box::new(CaptureGroup {
                clones: clones(parts[group[0]].hook.cast()?),
                recorders,
                selection: select.rows(parts, &group),
            }) as Box<dyn Joint>)
        });
        groups.collect()
    }
}
