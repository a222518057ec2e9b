//! Arguments of a call that pre-hooks of members replaced.
//!
//! The rows of the other members in such an argument are copies. Writes to these in place, of the
//! module or of a hook, go into the tensor that it stands for as well, as in a call of only that member.

use std::any::Any;
use std::cell::Cell;

use pyo3::intern;
use pyo3::prelude::*;

use crate::call::Call;
use crate::call::around::Kept;
use crate::error::rows_error;
use crate::rows::batch::BatchBase;
use crate::rows::layout::Layout;
use crate::rows::numbers::Rows;
use crate::torch::facts::Facts;
use crate::torch::tensors::version_if_any;

/// Replaced arguments of a call.
pub struct StandIns {
    batch: Py<BatchBase>,
    all: Vec<StandIn>,
    pairs: Vec<Pair>,
}

/// A tensor in place of another.
struct StandIn {
    now: Py<PyAny>,
    was: Py<PyAny>,
    dim: usize,
    /// Rows that no hook replaced.
    rows: Rows,
    /// Members whose hooks replaced theirs.
    replaced: Vec<usize>,
    /// None without a counter, as in inference mode: writes of the module are not noticed there.
    version: Cell<Option<i64>>,
    /// True if a hook may have written to a view of it.
    touched: Cell<bool>,
}

/// Two arguments that share memory for a member, and not in the batch.
struct Pair {
    member: usize,
    tensors: [Py<PyAny>; 2],
    rows: Rows,
    dim: usize,
    /// True if they are one tensor for the member.
    same: bool,
}

impl StandIns {
    pub fn of(batch: &Bound<'_, BatchBase>) -> Self {
        Self {
            batch: batch.clone().unbind(),
            all: Vec::new(),
            pairs: Vec::new(),
        }
    }

    /// Returns the stand-ins of a call.
    pub fn of_call<'a>(call: &'a Call<'_, '_>) -> Option<&'a Self> {
        let kept: &dyn Any = call.kept.as_deref()?;
        kept.downcast_ref()
    }

    /// Adds them to a call, after the stand-ins of earlier gaps.
    pub fn keep(mut self, call: &mut Call<'_, '_>) {
        if self.all.is_empty() && self.pairs.is_empty() {
            return;
        }
        let earlier = call.kept.take().map(|kept| kept as Box<dyn Any>);
        if let Some(Ok(mut earlier)) = earlier.map(Box::<dyn Any>::downcast::<Self>) {
            earlier.all.append(&mut self.all);
            earlier.pairs.append(&mut self.pairs);
            self = *earlier;
        }
        call.kept = Some(Box::new(self));
    }

    /// Adds a tensor in place of another, in which the rows of some members were replaced.
    pub fn add(
        &mut self,
        was: &Bound<'_, PyAny>,
        now: &Bound<'_, PyAny>,
        layout: &Layout,
        replaced: Vec<usize>,
    ) -> PyResult<()> {
        let members = self.batch.get().all();
        let mut unchanged = vec![true; layout.size];
        for member in &replaced {
            for row in layout.rows(members, *member).iter() {
                unchanged[row] = false;
            }
        }
        let rows: Vec<_> = (0..layout.size).filter(|row| unchanged[*row]).collect();
        if !rows.is_empty() {
            self.all.push(StandIn {
                now: now.clone().unbind(),
                was: was.clone().unbind(),
                dim: layout.dim,
                rows: Rows::of(rows),
                replaced,
                version: Cell::new(version_if_any(now)?),
                touched: Cell::new(false),
            });
        }
        Ok(())
    }

    /// Adds the pairs among arguments that share memory for a member, and not in the batch.
    /// `of_member`: the argument, by its place, that a member has by itself.
    pub fn add_pairs<'py>(
        &mut self,
        now: &[&Bound<'py, PyAny>],
        layout: &Layout,
        of_member: impl Fn(usize, usize) -> Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let pairs = (0..now.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
        for (one, other) in pairs {
            let address = Facts::address_of_storage(now[one])?;
            if address == Facts::address_of_storage(now[other])?
                || !layout.covers(now[one])?
                || !layout.covers(now[other])?
            {
                continue;
            }
            let batch = self.batch.get();
            for member in 0..batch.all().len() {
                let rows = layout.rows(batch.all(), member);
                let own = [of_member(member, one), of_member(member, other)];
                let same = own[0].is(&own[1]);
                let address = Facts::address_of_storage(&own[0])?;
                let shares = address.is_some() && address == Facts::address_of_storage(&own[1])?;
                if rows.len() > 0 && (same || shares) {
                    self.pairs.push(Pair {
                        member,
                        tensors: [now[one], now[other]].map(|it| it.clone().unbind()),
                        rows: rows.clone(),
                        dim: layout.dim,
                        same,
                    });
                }
            }
        }
        Ok(())
    }

    /// True if a member has arguments that share memory only in its part of the call.
    pub fn has_pairs(&self, member: usize) -> bool {
        self.pairs.iter().any(|pair| pair.member == member)
    }

    /// True if a tensor is one of these.
    pub fn is_paired(&self, tensor: &Bound<'_, PyAny>, member: usize) -> bool {
        let mut pairs = self.pairs.iter();
        pairs.any(|it| it.member == member && it.tensors.iter().any(|each| each.is(tensor)))
    }

    /// Returns the tensors that one stands for, to a member.
    pub fn originals<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        member: usize,
    ) -> Vec<Bound<'py, PyAny>> {
        let (mut found, mut now) = (Vec::new(), tensor.clone());
        for each in self.all.iter().rev() {
            if each.now.is(&now) && !each.replaced.contains(&member) {
                now = each.was.bind(tensor.py()).clone();
                found.push(now.clone());
            }
        }
        found
    }

    /// Notes that a member may have written to a view of a tensor.
    pub fn touch(&self, tensor: &Bound<'_, PyAny>) {
        for each in self.all.iter().filter(|each| each.now.is(tensor)) {
            each.touched.set(true);
        }
    }

    /// Notes that a member's write to a stand-in has reached the original tensors.
    pub fn note_written(&self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        for each in self.all.iter().filter(|each| each.now.is(tensor)) {
            each.version.set(version_if_any(tensor)?);
        }
        Ok(())
    }
}

impl StandIn {
    /// True if it was written in place since it was asked last.
    fn written(&self, py: Python<'_>) -> PyResult<bool> {
        let version = version_if_any(self.now.bind(py))?;
        let touched = self.touched.take() && version.is_none();
        Ok(self.version.replace(version) != version || touched)
    }
}

impl Kept for StandIns {
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        let members = self.batch.get().all();
        for pair in self.pairs.iter().filter(|pair| pair.same) {
            let [one, other] = &pair.tensors;
            let one = pair.rows.narrow(one.bind(py), pair.dim)?;
            let other = pair.rows.narrow(other.bind(py), pair.dim)?;
            if !one
                .call_method1(intern!(py, "equal"), (other,))?
                .is_truthy()?
            {
                let message = "the module writes in place to a tensor that shares memory with \
                               another argument, for this request only";
                members[pair.member].fail_with(py, rows_error(py, message))?;
            }
        }
        for each in self.all.iter().rev() {
            if each.written(py)? {
                let rows = each.rows.narrow(each.now.bind(py), each.dim)?;
                each.rows.write(each.was.bind(py), each.dim, &rows)?;
            }
        }
        Ok(())
    }
}
