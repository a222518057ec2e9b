//! Torch's own hooks, read from its dicts.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

use crate::error::warn;
use crate::torch::Torch;

/// Hook from one of torch's dicts.
pub struct TorchHook<'py> {
    pub callback: Bound<'py, PyAny>,
    pub with_kwargs: bool,
    pub always_call: bool,
}

impl TorchHook<'_> {
    /// Warns, in `nn.Module`'s words, of an `always_call` hook that raised after another exception.
    pub fn warn_silenced(&self, error: &PyErr) {
        let py = self.callback.py();
        let text = format!(
            "forward hook with ``always_call=True`` raised an exception that was silenced as \
             another error was raised in forward: {error}"
        );
        warn(py, &text);
    }
}

/// Torch's hooks for the module with this instance dict, read when their phase begins: global ones
/// first.
pub struct TorchHooks<'py>(pub Bound<'py, PyDict>);

/// Torch's backward hooks for one call.
#[derive(Default)]
pub struct TorchBackward<'py> {
    pub pre: Vec<Bound<'py, PyAny>>,
    pub full: Vec<Bound<'py, PyAny>>,
    /// Hooks of the deprecated kind, registered on the autograd node that made the output.
    pub non_full: Vec<Bound<'py, PyAny>>,
}

impl<'py> TorchHooks<'py> {
    pub fn forward_pre(&self) -> PyResult<Vec<TorchHook<'py>>> {
        let Self(state) = self;
        let torch = Torch::get(state.py())?;
        let hooks = torch.hooks_in(state, FORWARD_PRE)?.into_iter();
        hooks
            .map(|(id, callback)| {
                Ok(TorchHook {
                    with_kwargs: lists(state, "_forward_pre_hooks_with_kwargs", &id)?,
                    always_call: false,
                    callback,
                })
            })
            .collect()
    }

    pub fn forward(&self) -> PyResult<Vec<TorchHook<'py>>> {
        let Self(state) = self;
        let torch = Torch::get(state.py())?;
        let global = torch.globals.bind(state.py());
        let hooks = torch.hooks_in(state, FORWARD)?.into_iter();
        hooks
            .map(|(id, callback)| {
                Ok(TorchHook {
                    with_kwargs: lists(state, "_forward_hooks_with_kwargs", &id)?
                        || lists(global, "_global_forward_hooks_with_kwargs", &id)?,
                    always_call: lists(state, "_forward_hooks_always_called", &id)?
                        || lists(global, "_global_forward_hooks_always_called", &id)?,
                    callback,
                })
            })
            .collect()
    }

    pub fn backward(&self) -> PyResult<TorchBackward<'py>> {
        let Self(state) = self;
        let py = state.py();
        let torch = Torch::get(py)?;
        let mut hooks = TorchBackward::default();
        let pre = torch.hooks_in(state, BACKWARD_PRE)?;
        hooks.pre = pre.into_iter().map(|(_, hook)| hook).collect();
        let global = torch.globals.bind(py);
        let is_full = [
            global.get_item(intern!(py, "_global_is_full_backward_hook"))?,
            state.get_item(intern!(py, "_is_full_backward_hook"))?,
        ];
        for (dict, is_full) in torch.dicts(state, BACKWARD)?.into_iter().zip(is_full) {
            let Some(dict) = dict else {
                continue;
            };
            let non_full = is_full.is_some_and(|full| full.is(PyBool::new(py, false)));
            let kind = if non_full {
                &mut hooks.non_full
            } else {
                &mut hooks.full
            };
            kind.extend(items(&dict)?.into_iter().map(|(_, hook)| hook));
        }
        Ok(hooks)
    }
}

/// Indices of the kinds of hooks in [`Torch::global_hooks`] and [`Torch::module_hooks`].
const FORWARD: usize = 0;
const FORWARD_PRE: usize = 1;
const BACKWARD: usize = 2;
const BACKWARD_PRE: usize = 3;

impl Torch {
    /// Lists the hooks of a kind, for the module whose instance dict is `state`.
    fn hooks_in<'py>(&self, state: &Bound<'py, PyDict>, kind: usize) -> PyResult<Items<'py>> {
        let mut hooks = Vec::new();
        for dict in self.dicts(state, kind)?.into_iter().flatten() {
            hooks.extend(items(&dict)?);
        }
        Ok(hooks)
    }

    /// Returns the hook dicts of a kind: the global one and the module's.
    fn dicts<'py>(
        &self,
        state: &Bound<'py, PyDict>,
        kind: usize,
    ) -> PyResult<[Option<Bound<'py, PyDict>>; 2]> {
        let py = state.py();
        Ok([
            dict_in(self.globals.bind(py), self.global_hooks[kind].name.bind(py))?,
            dict_in(state, self.module_hooks[kind].name.bind(py))?,
        ])
    }
}

/// Hooks by their ids.
type Items<'py> = Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>;

/// Lists the items of a dict in its own order.
fn items<'py>(dict: &Bound<'py, PyDict>) -> PyResult<Items<'py>> {
    let py = dict.py();
    if dict.len() < 2 || dict.is_exact_instance_of::<PyDict>() {
        return dict.items().iter().map(|item| item.extract()).collect();
    }
    // `move_to_end` changes the order of an `OrderedDict`. Its copy is read, as other
    // threads may change it meanwhile.
    let copy = dict.call_method0(intern!(py, "copy"))?;
    let items = copy.call_method0(intern!(py, "items"))?;
    items.try_iter()?.map(|item| item?.extract()).collect()
}

/// True if the dict `namespace[name]` has the key `id`.
fn lists(namespace: &Bound<'_, PyDict>, name: &str, id: &Bound<'_, PyAny>) -> PyResult<bool> {
    let ids = dict_in(namespace, PyString::new(namespace.py(), name).as_any())?;
    ids.map_or(Ok(false), |ids| ids.contains(id))
}

fn dict_in<'py>(
    namespace: &Bound<'py, PyDict>,
    name: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let found = namespace.get_item(name)?;
    Ok(found.and_then(|found| found.cast_into().ok()))
}
