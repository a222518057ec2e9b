//! `Once`: a value of the process, made at first use.

use pyo3::PyTypeCheck;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// A value that is made at first use.
///
/// It is made with no lock held, as that may run Python: a finaliser or a signal handler that needs
/// the value meanwhile makes one too, and the first one stored is kept. `PyOnceLock` would deadlock.
pub struct Once<T>(PyOnceLock<T>);

impl<T> Once<T> {
    pub const fn new() -> Self {
        Self(PyOnceLock::new())
    }

    #[inline]
    pub fn get_or_try_init(
        &self,
        py: Python<'_>,
        make: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<&T> {
        match self.0.get(py) {
            Some(value) => Ok(value),
            None => self.init(py, make),
        }
    }

    #[cold]
    fn init(&self, py: Python<'_>, make: impl FnOnce() -> PyResult<T>) -> PyResult<&T> {
        let value = make()?;
        Ok(self.0.get_or_init(py, || value))
    }
}

impl<T: PyTypeCheck> Once<Py<T>> {
    /// Imports `name` from `module`.
    #[inline]
    pub fn import<'py>(
        &self,
        py: Python<'py>,
        module: &str,
        name: &str,
    ) -> PyResult<&Bound<'py, T>> {
        let import = || Ok(py.import(module)?.getattr(name)?.cast_into()?.unbind());
        self.get_or_try_init(py, import).map(|value| value.bind(py))
    }
}
