//! Frames: hooks that fire only for calls of the contexts that entered them.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ferrohook_core::{Phase, Registry, Snapshot};
use parking_lot::Mutex;
use pyo3::exceptions::{PyBaseException, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::contexts::current::{self, active, same_without, set, without};
use crate::contexts::releases::{Release, Releases};
use crate::contexts::scoped::{Modules, Scoped};
use crate::contexts::slot::FrameSlot;
use crate::contexts::state::{BatchPart, FrameLife, HookNeeds};
use crate::error::{hook_error, hook_type_error, type_name};
use crate::hooks::changes::Changes;
use crate::hooks::hook::Hook;

/// Id of a frame: unique in the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameId(u64);

impl Default for FrameId {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: uniqueness needs only atomicity.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Entry of a context's stack: hooks that fire in the contexts that entered it, until it is closed,
/// and a tag.
///
/// The tag is any object. Optional are its methods `begin(frame)`, which makes the value of the
/// `with` statement, and `left(fine)`, and its text `ONCE`, the error for entering again. Entering
/// and leaving is native: in Python, Ctrl-C might land in the middle.
#[pyclass(frozen, subclass, weakref, module = "ferrohook._core")]
#[derive(Default)]
pub struct Frame {
    id: FrameId,
    tag: Option<Py<PyAny>>,
    /// Frame whose hooks fire too: the one of a prepared plan, which is never entered itself.
    shared: Option<Py<Self>>,
    modules: Mutex<Modules>,
    life: FrameLife,
    needs: HookNeeds,
    /// First exception of one of its hooks, whatever their `on_error`.
    error: OnceLock<Py<PyBaseException>>,
    /// Number of changes to its hooks, without the shared frame's.
    changes: Arc<Changes>,
    part: BatchPart,
    slot: OnceLock<Box<dyn FrameSlot>>,
}

impl Frame {
    pub fn id(&self) -> FrameId {
        self.id
    }

    pub fn new(tag: Option<Py<PyAny>>) -> Self {
        Self {
            tag,
            ..Self::default()
        }
    }

    /// Makes a frame with which others keep state.
    pub fn with_slot(slot: Box<dyn FrameSlot>) -> Self {
        Self {
            slot: OnceLock::from(slot),
            ..Self::default()
        }
    }

    /// Makes a frame in which the hooks of `shared` fire.
    pub fn sharing(shared: Py<Self>) -> Self {
        Self {
            shared: Some(shared),
            ..Self::new(None)
        }
    }

    /// Number of changes to its hooks, without the shared frame's.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    /// Number of changes of its hooks and of the shared frame's.
    pub fn change_count(&self) -> u64 {
        let shared = self.shared.as_ref().map(|it| it.get().changes.count());
        self.changes.count() + shared.unwrap_or_default()
    }

    /// Looks an attribute up on the tag, if there is a tag.
    fn of_tag<'py>(&self, name: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.tag(name.py()) {
            Some(tag) => tag.getattr_opt(name),
            None => Ok(None),
        }
    }

    /// Ends the frame and removes its hooks. Returns true for the call that did so.
    fn remove_hooks(&self) -> bool {
        let mut modules = self.modules.lock();
        if self.life.closed.swap(true, Ordering::AcqRel) {
            return false;
        }
        // Removed and dropped after the lock is released: both run Python code.
        if self.life.for_graphs {
            let hooks = modules.hooks.values();
            let hooks: Vec<_> = hooks.map(|scoped| Arc::clone(&scoped.hooks)).collect();
            drop(modules);
            for hooks in hooks {
                hooks.clear(Some(Phase::ForwardPre));
                hooks.clear(Some(Phase::Forward));
            }
        } else {
            let taken = mem::take(&mut *modules);
            drop(modules);
            taken.clear();
        }
        self.changes.note(); // hooks that it shares fire for it no more
        if let Some(slot) = self.slot() {
            slot.close();
        }
        true
    }

    /// Leaves the frame, and closes it.
    pub fn leave(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let not_entered = || {
            let message = "this scope was not entered, or was already left";
            hook_error(py, message)
        };
        let token = this
            .life
            .entered
            .lock()
            .as_ref()
            .map(|it| it.token.clone_ref(py));
        let token = token.ok_or_else(not_entered)?;
        let active = active(py)?;
        // A copied context has the same frames: only the token identifies the one that entered.
        current::reset(
            token.bind(py),
            "a scope must be left in the thread and task that entered it: it is still entered \
             there",
        )?;
        // Out of order: this frame is left before one inside it, or was.
        if !same_without(&current::active(py)?, &active, slf.as_any()) {
            set(&without(&active, slf.as_any())?)?;
        }
        let _entered = this.life.entered.lock().take();
        this.close(py)?;
        if active
            .iter_borrowed()
            .last()
            .is_none_or(|last| !last.is(slf))
        {
            return Err(hook_error(
                py,
                "a scope must be left after the scopes that were entered inside it: it was left \
                 anyway, but they are still entered",
            ));
        }
        Ok(())
    }

    /// Calls the tag's `begin`, the first time.
    pub fn begin(slf: &Bound<'_, Self>) -> PyResult<()> {
        let this = slf.get();
        // Relaxed: the flag orders nothing.
        if !this.life.begun.swap(true, Ordering::Relaxed)
            && let Some(begin) = this.of_tag(intern!(slf.py(), "begin"))?
        {
            let begun = begin.call1((slf,))?;
            let _ = this.part.value.set(begun.unbind());
        }
        Ok(())
    }

    /// State that others keep with it, if there is some.
    pub fn slot(&self) -> Option<&dyn FrameSlot> {
        Some(&**self.slot.get()?)
    }

    /// State that others keep with it; made if there is none.
    pub fn slot_or(&self, make: impl FnOnce() -> Box<dyn FrameSlot>) -> &dyn FrameSlot {
        &**self.slot.get_or_init(make)
    }

    /// State that others keep with the frame whose hooks it shares, if there is some.
    pub fn shared_slot(&self) -> Option<&dyn FrameSlot> {
        self.shared.as_ref()?.get().slot()
    }

    /// True if it shares the hooks of a frame that is closed.
    pub fn shared_closed(&self) -> bool {
        self.shared.as_ref().is_some_and(|it| it.get().closed())
    }

    /// Time at which its part in batches ends, if there is one.
    pub fn deadline(&self) -> Option<Instant> {
        self.part.deadline.get().copied()
    }

    /// Ends its part in batches, for this reason. Returns true for the call that did so.
    pub fn end(&self, py: Python<'_>, error: &PyErr) -> bool {
        let first = self
            .part
            .failure
            .set(copied(py, error).into_value(py))
            .is_ok();
        self.changes.note();
        first
    }

    /// True if its hooks of a phase never start again.
    #[inline]
    pub fn ended_for(&self, phase: Phase) -> bool {
        let of_graph = || matches!(phase, Phase::BackwardPre | Phase::Backward);
        (self.closed() && !(self.life.for_graphs && of_graph())) || self.failed()
    }

    /// Notes an exception of one of its hooks; the first one stays.
    pub fn note_error(&self, py: Python<'_>, error: &PyErr) {
        let _ = self.error.set(copied(py, error).into_value(py));
    }

    /// True if it has hooks besides the shared frame's.
    pub fn has_own_hooks(&self) -> bool {
        let modules = self.modules.lock();
        let mut own = modules.hooks.values();
        own.any(|it| Phase::ALL.iter().any(|phase| it.hooks.occupied(*phase)))
    }

    /// True if it has a hook that needs gradients.
    pub fn needs_gradients(&self) -> bool {
        let own = self.needs.gradients.load(Ordering::Relaxed);
        own || self.shared().is_some_and(Self::needs_gradients)
    }

    /// True if it has hooks that run Python.
    pub fn runs_python(&self) -> bool {
        let own = self.needs.python.load(Ordering::Relaxed);
        own || self.shared().is_some_and(Self::runs_python)
    }

    /// Notes that it gets a hook: one that needs gradients, one that runs Python.
    pub fn note_hook(&self, py: Python<'_>, backward: bool, python: bool) -> PyResult<()> {
        if let Some(slot) = self.slot() {
            slot.check_hook(py, backward)?;
        }
        if python {
            self.needs.python.store(true, Ordering::Relaxed);
        }
        if backward {
            self.needs.gradients.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes the snapshot of a phase of the module with this id: own hooks and shared ones.
    pub fn snapshot(&self, module: u64, phase: Phase) -> Option<Snapshot<Hook>> {
        let all = self.all_hooks(module);
        let hooks = all.iter().flatten();
        let mut snapshots = hooks
            .filter(|hooks| hooks.occupied(phase))
            .map(|hooks| hooks.snapshot(phase));
        let first = snapshots.next()?;
        match snapshots.next() {
            None => Some(first),
            Some(second) => Some(Snapshot::merged(&[first, second]).0),
        }
    }

    /// Makes the operators run in graphs that contexts with this frame trace.
    pub fn use_operators(&self) {
        // Relaxed: the context that reads it entered the frame, or registered here.
        self.needs.operators.store(true, Ordering::Relaxed);
    }

    /// Looks up its own registry for the module with this id.
    fn hooks(&self, module: u64) -> Option<Arc<Registry<Hook>>> {
        let modules = self.modules.lock();
        if modules.hooks.is_empty() {
            return None;
        }
        Some(Arc::clone(&modules.hooks.get(&module)?.hooks))
    }

    /// Looks up its own registry for the module with this id, and the one of the frame it shares.
    fn all_hooks(&self, module: u64) -> [Option<Arc<Registry<Hook>>>; 2] {
        let shared = self.shared().and_then(|shared| shared.hooks(module));
        [self.hooks(module), shared]
    }

    /// The frame that it shares, unless it is closed.
    fn shared(&self) -> Option<&Self> {
        let shared = self.shared.as_ref().filter(|_| !self.closed())?;
        Some(shared.get())
    }

    /// Returns the registry for the module with this id, for registering; `others` is the one of
    /// every context.
    pub fn hooks_to_change(
        &self,
        py: Python<'_>,
        module: u64,
        phase: Phase,
        scoped: &Scoped,
        others: &Registry<Hook>,
    ) -> PyResult<Arc<Registry<Hook>>> {
        let mut modules = self.modules.lock();
        if self.closed() {
            drop(modules);
            return Err(closed(py));
        }
        let gone = modules.take_gone();
        let (hooks, unused) = modules.hooks_to_change(module, phase, scoped, others);
        drop(modules);
        drop((gone, unused)); // runs Python code
        Ok(hooks)
    }

    /// Registers an attachment to be released on close; a closed frame releases it at once and raises.
    pub fn release_at_end(&self, py: Python<'_>, attachment: Box<dyn Release>) -> PyResult<()> {
        if let Err(closed) = self.check_open(py) {
            attachment.release(py)?;
            return Err(closed);
        }
        self.life.attachments.add(attachment);
        // Another thread may have closed the frame meanwhile, without this attachment.
        self.check_open(py)
            .inspect_err(|_| drop(self.life.attachments.release(py)))
    }

    /// Takes out the attachments that close would release, for `put_releases`.
    pub fn take_releases(&self) -> Releases {
        self.life.attachments.take()
    }

    /// Registers these to be released on close: at once if it is closed.
    pub fn put_releases(&self, py: Python<'_>, releases: Releases) -> PyResult<()> {
        self.life.attachments.extend(releases);
        if self.closed() {
            return self.life.attachments.release(py);
        }
        Ok(())
    }

    /// Raises if the frame is closed.
    pub fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.closed() {
            return Err(closed(py));
        }
        Ok(())
    }
}

const DEADLINE: &str = "the deadline of a request applies only in batches, so this request cannot \
                        be entered: pass it to fh.batch, or limit the calls with \
                        ferrohook.service.deadline";
const ONCE: &str = "a scope can be entered only once: use activate() for other threads, or call \
                    scope() again";

fn closed(py: Python<'_>) -> PyErr {
    hook_error(
        py,
        "this scope was left, and its hooks were removed: open a new one with scope()",
    )
}

#[pymethods]
impl Frame {
    #[new]
    #[pyo3(signature = (tag = None, *, for_graphs = false))]
    fn py_new(tag: Option<Py<PyAny>>, for_graphs: bool) -> Self {
        let life = FrameLife {
            for_graphs,
            ..FrameLife::default()
        };
        Self {
            life,
            ..Self::new(tag)
        }
    }

    /// The tag: an object that identifies the frame's purpose.
    #[getter(_tag)]
    pub fn tag<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.tag.as_ref()?.bind(py))
    }

    /// True once the frame is closed.
    #[getter]
    pub fn closed(&self) -> bool {
        self.life.closed.load(Ordering::Acquire)
    }

    /// A copy, without its traceback, of the exception that ended its part in batches, or else of
    /// the first one that one of its hooks raised, whatever the hook's `on_error`; None if none did.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyBaseException>> {
        Some(self.part.failure.get().or(self.error.get())?.bind(py))
    }

    /// True if its hooks fire in no batch any more, for the reason `error`.
    #[getter]
    pub fn failed(&self) -> bool {
        self.part.failure.get().is_some()
    }

    /// Ends its part in batches, from any thread: its hooks and captures stop before the next
    /// module, and `error` is this exception. Returns True for the call that did so.
    fn fail(&self, error: Bound<'_, PyBaseException>) -> bool {
        let py = error.py();
        self.end(py, &PyErr::from_value(error.into_any()))
    }

    /// Makes it fail with `TimeoutError` in batches once so many seconds have passed; the first time
    /// that it is called counts.
    fn expire(&self, seconds: f64) -> PyResult<()> {
        let after = Duration::try_from_secs_f64(seconds)
            .map_err(|error| PyValueError::new_err(format!("seconds: {error}")))?;
        if let Some(deadline) = Instant::now().checked_add(after) {
            let _ = self.part.deadline.set(deadline);
            self.changes.note();
        }
        Ok(())
    }

    /// Value of the tag's `begin`, called when it first joined a batch; None before.
    #[getter]
    fn _begun<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        Some(self.part.value.get()?.bind(py))
    }

    /// True if it has hooks.
    #[getter(_hooked)]
    fn hooked(&self) -> bool {
        let own = !self.modules.lock().hooks.is_empty();
        own || self.shared().is_some_and(Self::hooked)
    }

    /// The frames of the context that entered it, itself the last; None before it is entered and
    /// after it is left.
    #[getter(_entered)]
    pub fn entered<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyTuple>> {
        if self.closed() {
            return None;
        }
        let entered = self.life.entered.lock();
        Some(entered.as_ref()?.frames.bind(py).clone())
    }

    #[pyo3(name = "__enter__")]
    pub fn enter<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        if this.deadline().is_some() {
            return Err(hook_error(py, DEADLINE));
        }
        if this.closed() || this.life.begun.swap(true, Ordering::Relaxed) {
            let message = this.of_tag(intern!(py, "ONCE"))?;
            let message = message.map_or_else(|| Ok(ONCE.to_owned()), |text| text.extract())?;
            return Err(hook_error(py, message));
        }
        let enter = || {
            let value = match this.of_tag(intern!(py, "begin"))? {
                Some(begin) => begin.call1((slf,))?,
                None => slf.as_any().clone(),
            };
            *this.life.entered.lock() = Some(current::enter(slf.as_any())?);
            Ok(value)
        };
        enter().inspect_err(|_| drop(this.close(py)))
    }

    #[pyo3(signature = (error = None, *_others))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        _others: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        Self::leave(slf)?;
        let py = slf.py();
        if let Some(left) = slf.get().of_tag(intern!(py, "left"))? {
            left.call1((error.is_none(),))?;
        }
        Ok(())
    }

    /// Makes it the outermost frame of this context until `take_out`, so that frames inside are
    /// still left in order.
    #[pyo3(name = "_enter_outermost")]
    fn enter_outermost(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let inner = active(py)?;
        let frames: Vec<_> = std::iter::once(slf.as_any().clone()).chain(inner).collect();
        set(&PyTuple::new(py, frames)?).map(drop)
    }

    /// Closes the frame and takes it out of this context, at any position.
    #[pyo3(name = "_take_out")]
    fn take_out(slf: &Bound<'_, Self>) -> PyResult<()> {
        slf.get().close(slf.py())?;
        set(&without(&active(slf.py())?, slf.as_any())?).map(drop)
    }

    /// Removes the frame's hooks and releases its attachments, wherever it is entered: it is still
    /// to be left there. Returns True for the call that did so.
    #[pyo3(name = "_close")]
    pub fn close(&self, py: Python<'_>) -> PyResult<bool> {
        let closed = self.remove_hooks();
        self.life.attachments.release(py).map(|()| closed)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for scoped in self.modules.lock().hooks.values() {
            scoped.hooks.visit(|hook| visit.call(hook.object()))?;
        }
        visit.call(&self.tag)?;
        visit.call(&self.shared)?;
        visit.call(self.part.value.get())?;
        visit.call(self.part.failure.get())?;
        visit.call(self.error.get())?;
        if let Some(entered) = &*self.life.entered.lock() {
            visit.call(&entered.frames)?;
            visit.call(&entered.token)?;
        }
        self.slot().map_or(Ok(()), |slot| slot.traverse(&visit))
    }

    fn __clear__(&self) {
        self.remove_hooks();
        let modules = mem::take(&mut *self.modules.lock());
        modules.clear();
        let _entered = self.life.entered.lock().take();
    }
}

/// Argument `scope=`: a frame.
pub struct ScopeArg<'py>(pub Bound<'py, Frame>);

impl<'py> FromPyObject<'_, 'py> for ScopeArg<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object
            .cast::<Frame>()
            .map(|frame| Self((*frame).clone()))
            .map_err(|_| {
                hook_type_error(
                    object.py(),
                    format!(
                        "scope must be the result of scope(), got {}",
                        type_name(&object)
                    ),
                )
            })
    }
}

/// Returns the snapshots of a phase that `frames` have for the module with this id, each with its
/// owner; those they share last.
pub fn hooks<'py>(
    frames: &Bound<'py, PyTuple>,
    module: u64,
    phase: Phase,
) -> impl Iterator<Item = (Bound<'py, Frame>, Snapshot<Hook>)> {
    each(frames).flat_map(move |frame| {
        let hooks = frame.get().all_hooks(module).into_iter().flatten();
        let hooks = hooks.filter(move |it| it.occupied(phase));
        hooks.map(move |hooks| ((*frame).clone(), hooks.snapshot(phase)))
    })
}

/// Copies an exception, as its traceback would keep all frames below alive. Returns the exception
/// itself if it has no copy that says the same.
pub fn copied(py: Python<'_>, error: &PyErr) -> PyErr {
    let value = error.value(py).as_any();
    let texts = |error: &Bound<'_, PyAny>| {
        PyResult::Ok([error.str()?, error.repr()?].map(|it| it.to_string()))
    };
    let said = texts(value).ok();
    let made = [copy_of, copy_without_init].into_iter().find_map(|make| {
        let copy = make(value).ok()?;
        let alike = copy.get_type().is(value.get_type()) && !copy.is(value);
        (alike && said.is_some() && texts(&copy).ok() == said).then_some(copy)
    });
    made.map_or_else(|| error.clone_ref(py), PyErr::from_value)
}

fn copy_of<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let copy = value.py().import("copy")?;
    copy.call_method1("copy", (value,))
}

/// Copies an exception whose `__init__` takes other arguments than it has in `args`.
fn copy_without_init<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let class = value.get_type();
    let args = value.getattr("args")?;
    let copy = class.call_method1("__new__", (&class,))?;
    copy.setattr("args", args)?;
    let attributes = value.getattr("__dict__")?;
    copy.getattr("__dict__")?
        .call_method1("update", (attributes,))?;
    Ok(copy)
}

/// Yields the frames of a tuple.
pub fn each<'a, 'py>(
    frames: &'a Bound<'py, PyTuple>,
) -> impl DoubleEndedIterator<Item = Borrowed<'a, 'py, Frame>> {
    frames.iter_borrowed().filter_map(|it| it.cast().ok())
}

/// Returns the tuple of the frames that are not closed: a copied context may hold others.
pub fn only_open<'py>(frames: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
    let open: Vec<_> = each(frames).filter(|it| !it.get().closed()).collect();
    if open.len() == frames.len() {
        return Ok(frames.clone());
    }
    PyTuple::new(frames.py(), open)
}

/// True if calls in `frames` run hooks of others for the module with this id.
pub fn any_of_others(frames: &Bound<'_, PyTuple>, module: u64, phases: &[Phase]) -> bool {
    each(frames).any(|frame| {
        let slot = frame.get().slot();
        slot.is_some_and(|slot| slot.has_hooks(&frame, module, phases))
    })
}

/// True if one of `frames` has hooks for which operators stand in graphs.
pub fn any_operators(frames: &Bound<'_, PyTuple>) -> bool {
    each(frames).any(|frame| {
        let frame = frame.get();
        let mut all = frame.shared().into_iter().chain([frame]);
        all.any(|it| it.needs.operators.load(Ordering::Relaxed))
    })
}
