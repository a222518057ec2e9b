//! Makes `Py_GIL_DISABLED` and the like known to `cfg`.

fn main() {
    pyo3_build_config::use_pyo3_cfgs();
}
