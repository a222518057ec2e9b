//! `BatchBase`: a frame whose calls serve many requests, one or more rows each.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ferrohook_core::Phase;
use parking_lot::Mutex;
use pyo3::exceptions::PyBaseException;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use rustc_hash::FxHashMap;

use crate::call::around::AroundSlot;
use crate::contexts::current;
use crate::contexts::frame::Frame;
use crate::contexts::regions;
use crate::error::{hook_error, rows_error};
use crate::rows::calls::program::Program;
use crate::rows::calls::program_cache::{ProgramCache, ProgramKey};
use crate::rows::given;
use crate::rows::layout::{Gathered, Layout};
use crate::rows::matrix::{CallArguments, Padded};
use crate::rows::member::{Member, RowOwners};
use crate::rows::membership::Membership;
use crate::rows::numbers::{BatchRows, Selections, length};
use crate::rows::places::{
    MemberPlace, OwnRows, Position, TokenDims, TokenPositions, Tokens, in_tensors,
};
use crate::rows::positions::Positions;
use crate::torch::copies;
use crate::torch::tensors::any_tensor;

/// Number of sites that are open in the process.
static SITES: AtomicUsize = AtomicUsize::new(0);

const CAPTURING: &str = "a batch cannot be entered while a CUDA graph is being captured, because \
                         no replay would enter it: open `fh.rows.sites` of the model, capture the \
                         graph outside of batches, and enter a batch for each replay";

/// Counts open sites.
pub fn count_sites(opened: bool) {
    // Relaxed: see `BatchBase::__enter__`.
    if opened {
        SITES.fetch_add(1, Ordering::Relaxed);
    } else {
        SITES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns `frame` as a member of a batch; raises if it cannot be one.
fn member_of(frame: &Bound<'_, PyAny>, rows: BatchRows, logs: bool) -> PyResult<Member> {
    if frame.cast::<BatchBase>().is_ok() {
        return Err(rows_error(
            frame.py(),
            "a batch cannot be a member of another batch",
        ));
    }
    Member::of(frame, rows, logs)
}

/// Batches as what stands around a phase of a call: hooks of their members run in the calls.
pub struct Batches;

/// Base of batches.
#[pyclass(frozen, subclass, extends = Frame, module = "ferrohook._core")]
pub struct BatchBase {
    members: Box<[Member]>,
    dim: usize,
    size: OnceLock<usize>,
    /// Number of rows up to the last one of a member.
    named: usize,
    /// Positions of the rows in the calls from now on; None if they are not known.
    positions: Mutex<Option<Arc<Positions>>>,
    /// Rows of members together.
    selections: Selections,
    /// True if a member had hooks that run Python, which may write in place, as it was entered.
    python: AtomicBool,
    /// Modules with their own row layout, by address.
    gathered: FxHashMap<usize, Gathered>,
    joined: AtomicBool,
    /// True if sites serve the members: their hooks then fire in calls of modules in `outside` only.
    in_sites: AtomicBool,
    /// Ids of modules that are called outside of the graph that has the sites.
    outside: OnceLock<Vec<u64>>,
    /// True if entering it attaches hooks to modules.
    attaches: AtomicBool,
    /// Number of changes of the members' hooks while it is entered.
    epoch: Arc<AtomicU64>,
    /// Programs of the members, from the moment it is entered until it is left.
    programs: Mutex<Option<Box<ProgramCache>>>,
}

#[pymethods]
impl BatchBase {
    /// Makes a batch; refuses rows that overlap or are out of range.
    ///
    /// `rows`: a dict of members and their rows, see `fh.batch`; or in a step of an engine, whose
    /// rows are single tokens with positions that increase by one, pairs of a member and a tuple
    /// that has at its indices 1 to 4 the first row, the number of rows, the first position and the
    /// length of the prompt.
    #[new]
    #[pyo3(signature = (rows, dim, size, gathered, *_others))]
    fn new(
        rows: &Bound<'_, PyAny>,
        dim: usize,
        size: Option<usize>,
        gathered: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>, Option<usize>)>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<(Self, Frame)> {
        let py = rows.py();
        let mut spans = None;
        let mut members = Vec::new();
        if let Ok(rows) = rows.cast::<PyDict>() {
            for (member, rows) in rows.iter() {
                members.push(member_of(&member, given::read(&rows, size)?, true)?);
            }
        } else {
            let rows = rows.cast::<PyList>()?;
            spans = Some(given::Spans::default());
            for pair in rows.iter() {
                let (member, span) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
                let rows = spans.get_or_insert_default().read(span.cast()?)?;
                members.push(member_of(&member, rows, false)?);
            }
        }
        if members.is_empty() {
            return Err(rows_error(py, "a batch needs at least one request"));
        }
        let ends = members.iter().map(|member| member.rows.in_tensors().end());
        let named = ends.max().unwrap_or_default();
        if let Some(size) = size
            && named > size
        {
            let message = format!(
                "row {} is out of range: the batch has {size} rows",
                named - 1
            );
            return Err(rows_error(py, message));
        }
        if named > given::MOST_ROWS {
            return Err(given::too_many(py, named - 1));
        }
        RowOwners::of(py, &members, named)?;
        let gathered = gathered.into_iter().map(|(module, index, own)| {
            let gathered = Gathered {
                index: index.unbind(),
                dim: own.unwrap_or(dim),
                module: module.clone().unbind(),
            };
            (module.as_ptr() as usize, gathered)
        });
        let positions = spans.as_ref().map(|spans| {
            let values = spans.positions(size.unwrap_or(named));
            Positions::new(values, None, spans.prompts())
        });
        let batch = Self {
            python: AtomicBool::new(false),
            members: members.into(),
            dim,
            size: size.map_or_else(OnceLock::new, OnceLock::from),
            named,
            positions: Mutex::new(positions.map(Arc::new)),
            selections: Selections::default(),
            gathered: gathered.collect(),
            joined: AtomicBool::new(false),
            in_sites: AtomicBool::new(false),
            outside: OnceLock::new(),
            attaches: AtomicBool::new(false),
            epoch: Arc::default(),
            programs: Mutex::default(),
        };
        Ok((batch, Frame::with_slot(Box::new(AroundSlot(&Batches)))))
    }

    /// Sets the number of rows, their positions in the calls from now on, row by row, the number of
    /// columns of a padded batch, and the lengths of the members' prompts.
    #[pyo3(signature = (size, values, columns, lengths))]
    fn _set_positions(
        &self,
        size: usize,
        values: Vec<i64>,
        columns: Option<usize>,
        lengths: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let prompts = self.members.iter().map(|member| {
            let lengths = lengths.get_item(&member.frame)?;
            lengths.map(|lengths| given::lengths(&lengths)).transpose()
        });
        let values = values.into_iter().map(Position).collect();
        let positions = Positions::new(values, columns, prompts.collect::<PyResult<_>>()?);
        let _ = self.size.set(size); // if it was known, it is the same
        let _former = self.positions.lock().replace(Arc::new(positions));
        // They chose rows at the former positions.
        self.selections.clear();
        Ok(())
    }

    /// Gives the members the lengths of their prompts, and finds the tokens of each at the positions
    /// of its plan, for the calls from now on.
    #[pyo3(name = "_place")]
    fn place(&self, py: Python<'_>) -> PyResult<()> {
        let positions = self.positions.lock().clone();
        for (number, member) in self.members.iter().enumerate() {
            let Some(positions) = &positions else {
                Membership::set_masks(member.frame.get(), None);
                continue;
            };
            let placed = positions.place(py, number, member, self.dim);
            placed.inspect_err(|error| {
                let _ = error.value(py).setattr("member", &member.frame);
            })?;
        }
        Ok(())
    }

    /// Position of each row; None if they are not known.
    #[getter]
    fn _positions(&self) -> Option<Vec<i64>> {
        let positions = Arc::clone(self.positions.lock().as_ref()?);
        Some(positions.values.iter().map(|it| it.0).collect())
    }

    /// Number of columns of a padded batch; None if each row is one token.
    #[getter(_columns)]
    fn columns(&self) -> Option<usize> {
        self.positions.lock().as_ref()?.columns
    }

    /// Makes sites serve the plans of the members: their hooks fire in no call, except of modules in
    /// `outside`, by the ids of their registries. `copies`: what hooks capture is copied, as the memory
    /// is written later.
    ///
    /// Raises:
    ///     RowsError: a member has extra hooks; `member` is that one.
    #[pyo3(signature = (*, copies = false, outside = Vec::new()))]
    fn _serve(&self, py: Python<'_>, copies: bool, outside: Vec<u64>) -> PyResult<()> {
        let _ = self.outside.set(outside); // once: it is entered once
        self.in_sites.store(true, Ordering::Release);
        self.python.fetch_or(copies, Ordering::Relaxed);
        self.members.iter().try_for_each(|member| {
            Membership::serve(py, member.frame.get()).inspect_err(|error| {
                let _ = error.value(py).setattr("member", &member.frame);
            })
        })
    }

    /// Makes entering it call `_attach`, which no interrupt leaves half-done.
    fn _attach_as_entered(&self) {
        self.attaches.store(true, Ordering::Relaxed);
    }

    /// Numbers of the members whose hooks fire.
    fn _live(&self) -> Vec<usize> {
        let live = self.members.iter().enumerate().filter(|(_, member)| {
            let frame = member.frame.get();
            let ended = frame.failed() || frame.closed() || frame.shared_closed();
            member.rows.len() > 0 && !ended
        });
        live.map(|(number, _)| number).collect()
    }

    /// Fails the members whose deadline has passed, and returns the number of changes, so far, of
    /// members' hooks.
    #[pyo3(name = "_version")]
    fn version(&self, py: Python<'_>) -> u64 {
        let mut now = None;
        let changes = self.members.iter().map(|member| {
            member.expire(py, &mut now);
            member.frame.get().change_count()
        });
        changes.sum()
    }

    /// Returns `_version` in a call that it is entered for; None in any other.
    fn _version_here(slf: &Bound<'_, Self>) -> PyResult<Option<u64>> {
        let (py, this) = (slf.py(), slf.get());
        let here = current::active(py)?.iter().any(|frame| frame.is(slf));
        let serves = here && !slf.as_super().get().closed();
        Ok(serves.then(|| this.version(py)))
    }

    /// Fails a member for an exception; raises it if it is no fault, as `KeyboardInterrupt`.
    fn _fail(&self, member: usize, error: &Bound<'_, PyBaseException>) -> PyResult<()> {
        let py = error.py();
        let error = PyErr::from_value(error.clone().into_any());
        self.members[member].fail_with(py, error)
    }

    /// Modules with their own row layout.
    #[getter]
    fn _gathered<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let gathered = self.gathered.values();
        gathered.map(|it| it.module.bind(py).clone()).collect()
    }

    /// Marks that modules of members ran.
    fn _mark_ran(&self, members: Vec<usize>) {
        for member in members {
            self.members[member].ran.store(true, Ordering::Relaxed);
        }
    }

    /// Number of rows up to the last one of a member.
    #[getter]
    fn _named(&self) -> usize {
        self.named
    }

    /// Rows of a member.
    fn _rows(&self, member: usize) -> Vec<usize> {
        let rows = self.members[member].rows.iter();
        rows.map(|row| row.0).collect()
    }

    /// Dimension of the rows.
    #[getter]
    fn dim(&self) -> usize {
        self.dim
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

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        for frame in current::active(py)?.iter() {
            if let Ok(outer) = frame.cast::<Self>()
                && !outer.as_super().get().closed()
            {
                return Err(rows_error(
                    py,
                    "batches cannot be nested: a call can be in only one",
                ));
            }
        }
        if this.joined.swap(true, Ordering::Relaxed) {
            return Err(rows_error(
                py,
                "a batch can be entered only once: create a new one for the next step",
            ));
        }
        for (at, member) in this.members.iter().enumerate() {
            let frame = member.frame.bind(py);
            Membership::join(frame, &this.epoch).inspect_err(|error| {
                this.part(at);
                let _ = error.value(py).setattr("member", frame);
            })?;
        }
        // If the batch is refused, no member has started. A member whose start was interrupted is
        // closed, as when it is entered by itself: it would record nothing.
        for member in &this.members {
            let frame = member.frame.bind(py);
            Frame::begin(frame).inspect_err(|_| {
                this.part(this.members.len());
                drop(frame.get().close(py));
            })?;
        }
        let mut frames = this.members.iter().map(|it| it.frame.get());
        let python = frames.any(Frame::runs_python);
        this.python.store(python, Ordering::Relaxed);
        this.start_programs();
        let enter = || {
            if this.attaches.load(Ordering::Relaxed) {
                slf.call_method0(intern!(py, "_attach"))?;
            }
            if copies::capturing(py)? == Some(true) {
                return Err(hook_error(py, CAPTURING));
            }
            // Relaxed: sites are opened before a batch is entered that they are to serve.
            if SITES.load(Ordering::Relaxed) > 0 {
                slf.call_method0(intern!(py, "_begin_service"))?;
            }
            if this.in_sites.load(Ordering::Acquire) {
                slf.call_method0(intern!(py, "_moved"))?;
            } else {
                this.place(py)?;
            }
            Frame::enter(slf.as_super())
        };
        enter().inspect_err(|_| {
            let _ = slf.as_super().get().close(py);
            this.part(this.members.len());
            if this.in_sites.swap(false, Ordering::AcqRel) {
                let _ = slf.call_method0(intern!(py, "_end_service"));
            }
        })
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let left = Frame::leave(slf.as_super());
        if left.is_err() {
            // Left from the wrong context. Close now: the right one may never leave it.
            slf.as_super().get().close(py)?;
        }
        let members = &this.members;
        this.give_programs();
        this.part(members.len());
        if this.in_sites.swap(false, Ordering::AcqRel) {
            slf.call_method0(intern!(py, "_end_service"))?;
        }
        left?;
        let ran = |member: &Member| member.ran.load(Ordering::Relaxed);
        if error.is_none() && !members.iter().all(ran) {
            slf.call_method0(intern!(py, "_warn_of_silence"))?;
        }
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for member in &self.members {
            visit.call(&member.frame)?;
        }
        for gathered in self.gathered.values() {
            visit.call(&gathered.index)?;
            visit.call(&gathered.module)?;
        }
        match &*self.programs.lock() {
            Some(programs) => programs.traverse(&visit),
            None => Ok(()),
        }
    }
}

impl BatchBase {
    /// True if the hooks of its members fire in calls of the module with this id, in the context that
    /// entered it.
    pub fn fires_at(&self, module: u64) -> bool {
        let outside = || self.outside.get().is_some_and(|it| it.contains(&module));
        !self.in_sites.load(Ordering::Acquire) || outside()
    }

    /// True if hooks of its members fire in calls of the module with this id.
    pub fn has_hooks(&self, module: u64, phases: &[Phase]) -> bool {
        self.fires_at(module)
            && self.members.iter().any(|member| {
                let frame = member.frame.get();
                let mut phases = phases.iter();
                !frame.failed() && phases.any(|phase| frame.snapshot(module, *phase).is_some())
            })
    }

    /// Starts to cache programs. The first member has the cache of the last batch of the same
    /// members and rows. The members have joined.
    fn start_programs(&self) {
        let key = ProgramKey {
            members: self
                .members
                .iter()
                .map(|it| {
                    let frame = it.frame.get();
                    (frame.id(), frame.change_count(), it.rows.clone())
                })
                .collect(),
            dim: self.dim,
        };
        let former = self.first().and_then(Membership::take_programs);
        let (started, unused) = ProgramCache::start(key, former, self.deadline());
        *self.programs.lock() = Some(started);
        drop(unused); // runs Python code
    }

    /// Gives the programs to the first member, for the next batch, if no hook changed.
    fn give_programs(&self) {
        let taken = self.programs.lock().take();
        if let Some(programs) = taken
            && self.epoch() == 0
            && let Some(first) = self.first()
        {
            first.keep_programs(programs);
        }
    }

    /// Membership of the first member.
    fn first(&self) -> Option<&Membership> {
        Membership::of(self.members[0].frame.get())
    }

    /// First deadline of a member.
    fn deadline(&self) -> Option<Instant> {
        let members = self.members.iter();
        members.filter_map(|it| it.frame.get().deadline()).min()
    }

    /// Number of changes of the members' hooks since it was entered.
    pub fn epoch(&self) -> u64 {
        // Acquire pairs with the release of `Changes::note`.
        self.epoch.load(Ordering::Acquire)
    }

    /// Finds the cached program at a module, by the id of its registry.
    pub fn cached_program(&self, module: &Bound<'_, PyAny>, id: u64) -> Option<Arc<Program>> {
        if self.gathered_of(module).is_some() {
            return None;
        }
        let mut programs = self.programs.lock();
        let found = programs
            .as_mut()?
            .find(id, self.epoch(), || self.deadline());
        drop(programs);
        found.unwrap_or_default() // drops stale ones, which runs Python code
    }

    /// Caches the program at the module with this id, unless that has rows of
    /// its own. `epoch`: read before they were looked for.
    pub fn cache_program(&self, layout: &Layout, module: u64, epoch: u64, program: Arc<Program>) {
        if layout.is_of_batch() {
            let mut programs = self.programs.lock();
            let dropped = programs.as_mut().map(|it| it.add(module, epoch, program));
            drop(programs);
            drop(dropped); // runs Python code
        }
    }

    /// Rows of a module that has its own row layout.
    fn gathered_of(&self, module: &Bound<'_, PyAny>) -> Option<&Gathered> {
        self.gathered.get(&(module.as_ptr() as usize))
    }

    pub fn all(&self) -> &[Member] {
        &self.members
    }

    pub fn positioned(&self) -> bool {
        self.positions.lock().is_some()
    }

    /// Returns the positions of a member's tokens, and the number of columns of padded rows.
    fn tokens_here(&self, member: usize) -> Option<(Arc<[Position]>, Option<usize>)> {
        let member_here = &self.members[member];
        if regions::any_open()
            && let Some(repeated) = Membership::repeated(member_here.frame.get())
        {
            return repeated.of_tokens(); // the batch may have moved since
        }
        let positions = Arc::clone(self.positions.lock().as_ref()?);
        Some((positions.of(member, member_here), positions.columns))
    }

    /// Returns the positions of a member's tokens in the tensors of a module, if they are known.
    pub fn positions_of(&self, layout: &Layout, member: usize) -> Option<TokenPositions> {
        let (values, columns) = self.tokens_here(member)?;
        let own = layout.own_rows(member);
        let Some(columns) = columns else {
            let of_batch = TokenPositions::of_rows(values, layout.dim);
            return match own {
                Some(OwnRows::Gathered { places, dim }) => of_batch.at(&in_tensors(places), *dim),
                Some(OwnRows::Matrix) | None => Some(of_batch),
            };
        };
        let all = || {
            (0..self.members[member].rows.len())
                .map(MemberPlace)
                .collect()
        };
        let places = match own {
            Some(OwnRows::Gathered { dim: 1.., .. }) => return None,
            Some(OwnRows::Gathered { places, .. }) => Arc::clone(places),
            Some(OwnRows::Matrix) | None => all(),
        };
        let found = TokenPositions::of_padded(&values, columns, &places);
        Some(match own {
            Some(OwnRows::Matrix) => TokenPositions {
                dims: TokenDims::Rows(0),
                ..found
            },
            _ => found,
        })
    }

    /// Returns a member's tokens in the tensors of a module.
    pub fn tokens_of(&self, layout: &Layout, member: usize) -> Tokens {
        Tokens {
            positions: self.positions_of(layout, member),
            own: layout.own_rows(member).cloned(),
        }
    }

    /// Selections of the rows in a module's tensors; None if it has its own row layout.
    pub fn selections(&self, layout: &Layout) -> Option<&Selections> {
        layout.is_of_batch().then_some(&self.selections)
    }

    /// True if a member had hooks that run Python, which may write in place, as it was entered: what
    /// is captured is copied then.
    pub fn runs_python(&self) -> bool {
        self.python.load(Ordering::Relaxed)
    }

    /// Sets the number of rows, unless it is known, from the call of a member's model.
    pub fn set_size(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.size.get().is_none() {
            any_tensor(value, &mut |tensor| {
                let size = length(tensor, self.dim)?.filter(|size| *size >= self.named);
                Ok(size.is_some_and(|size| self.size.set(size).is_ok()))
            })?;
        }
        Ok(())
    }

    /// Number of rows; without positions, `size` or a call of a member's model, the sum of the
    /// members' rows.
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
        let Some(gathered) = self.gathered_of(module) else {
            return Ok(Layout::of_batch(self.dim, self.rows()));
        };
        let py = module.py();
        let index = gathered.read(module, args, kwargs, output)?;
        let owners = RowOwners::of(py, &self.members, self.named)?;
        let size = self.size.get().copied();
        gathered.layout(py, &index, &self.members, &owners, size)
    }

    /// Finds the rows of a module's tensors whose value has none of the batch: matrices of its tokens.
    /// None if they are not known to be that. `covered`: the value has rows of the batch.
    pub fn matrices<'py>(
        &self,
        layout: &Layout,
        value: &Bound<'py, PyAny>,
        call: CallArguments<'_, 'py>,
        covered: bool,
    ) -> PyResult<Option<Layout>> {
        if !layout.is_of_batch() {
            return Ok(None);
        }
        let (rows, of_row) = (self.rows(), self.columns());
        let tokens = match of_row {
            Some(columns) => Padded { rows, columns },
            None if self.dim == 1 => Padded {
                rows: 1,
                columns: rows,
            },
            None => return Ok(None),
        };
        // A row of one token is either.
        if covered && of_row != Some(1) {
            return Ok(None);
        }
        let found = any_tensor(value, &mut |tensor| tokens.may_be_rows_of(tensor))?
            && !any_tensor(value, &mut |tensor| tokens.are_first(tensor))?
            && call.have(tokens)?;
        Ok(found.then(|| Layout::of_matrices(&self.members, rows, of_row.unwrap_or(1))))
    }

    fn part(&self, members: usize) {
        for member in &self.members[..members] {
            Membership::part(member.frame.get());
        }
    }
}
