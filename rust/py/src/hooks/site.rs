//! `Site`: one hook in one call, for its description in errors and its `on_error`.

use ferrohook_core::Entry;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::cpython::once::Once;
use crate::error::{repr, shown, type_name, warn};
use crate::hooks::hook::Hook;
use crate::hooks::options::OnError;
use crate::torch;

/// A hook being invoked, and the module that is called.
pub struct Site<'a, 'py> {
    pub entry: &'a Entry<Hook>,
    pub module: &'a Bound<'py, PyAny>,
}

impl Site<'_, '_> {
    fn py(&self) -> Python<'_> {
        self.module.py()
    }

    /// Describes hook, phase and module, and the entry of a plan.
    pub fn describe(&self) -> String {
        let hook = self.entry.hook();
        let named = hook.named(self.py());
        let name = name_of(&named).unwrap_or_else(|_| type_name(&named));
        let class = self
            .module
            .call_method0("_get_name")
            .and_then(|name| name.extract::<String>())
            .unwrap_or_else(|_| type_name(self.module));
        let module = hook.module_name().map_or_else(
            || class.clone(),
            |path| format!("{} ({class})", shown(path)),
        );
        let registered = match (hook.options.entry, &hook.place) {
            // A request may come from outside: its errors name no file of the program.
            (Some(entry), _) => format!(", entry {entry} of the plan"),
            (None, Some(place)) => place.file(self.py()).map_or_else(
                |_| String::new(),
                |file| format!(", registered at {file}:{}", place.line()),
            ),
            (None, None) => String::new(),
        };
        format!(
            "{} hook `{name}` of {module}{registered}",
            self.entry.phase()
        )
    }

    /// Applies the hook's `on_error` to its exception: `Ok` if the call goes on without the hook.
    pub fn apply_on_error(&self, error: PyErr) -> PyResult<()> {
        let py = self.py();
        if self.entry.hook().hidden(py) {
            return Err(error);
        }
        annotate(py, &error, &self.describe());
        if !is_fault(py, &error) {
            return Err(error);
        }
        let policy = self.entry.hook().options.on_error;
        if policy == OnError::Raise {
            return Err(error);
        }
        if policy == OnError::Disable {
            let text = error.to_string();
            let line = text.lines().next().map(str::to_owned);
            self.entry.hook().note_failure(line);
        }
        // Several threads may fail at once: the one that disables the hook logs.
        if policy == OnError::Disable && self.entry.disable() {
            let message = format!("disabled the {}: it raised", self.describe());
            if let Err(unlogged) = log_error(py, &message, &error) {
                unlogged.write_unraisable(py, None);
            }
        }
        Ok(())
    }

    /// Warns of a hook's exception that another exception, already being raised, replaces.
    pub fn warn_silenced(&self, error: &PyErr) {
        let py = self.py();
        let text = format!(
            "the {} raised {}, which was silenced because another exception was already being \
             raised",
            self.describe(),
            repr(error.value(py))
        );
        warn(py, &text);
    }
}

/// Returns the name of a hook as people write it.
fn name_of(hook: &Bound<'_, PyAny>) -> PyResult<String> {
    static NAME_OF: Once<Py<PyAny>> = Once::new();
    let name_of = NAME_OF.import(hook.py(), "ferrohook.util.texts", "name_of")?;
    name_of.call1((hook,))?.extract()
}

/// Adds a note to an exception that left the hook of a description.
pub fn annotate(py: Python<'_>, error: &PyErr, described: &str) {
    let note = format!("ferrohook: raised by the {described}");
    let error = error.value(py);
    let notes = error.getattr("__notes__");
    if notes.is_ok_and(|notes| notes.contains(&note).unwrap_or(false)) {
        return; // a hook may raise one exception again and again
    }
    // An exception class may refuse notes; the exception itself matters more.
    let _ = error.call_method1("add_note", (note,));
}

/// True if an exception is the fault of the hook that raised it. `KeyboardInterrupt` and `SystemExit`
/// are not, nor is the end of a recomputation of `torch.utils.checkpoint`.
pub fn is_fault(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyException>(py) && !torch::ends_recomputation(error, py)
}

/// Logs an exception through the logger of the package.
pub fn log_error(py: Python<'_>, message: &str, error: &PyErr) -> PyResult<()> {
    static LOGGER: Once<Py<PyAny>> = Once::new();
    let logger = LOGGER.get_or_try_init(py, || {
        py.import("logging")?
            .call_method1("getLogger", ("ferrohook",))
            .map(Bound::unbind)
    })?;
    let kwargs = pyo3::types::PyDict::new(py);
    kwargs.set_item("exc_info", error.value(py))?;
    logger
        .bind(py)
        .call_method("error", ("%s", message), Some(&kwargs))?;
    Ok(())
}
