//! CRC-32, the one of zlib, for the files of a store.

use std::slice;

use crc32fast::Hasher;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::cpython::invoke;

/// Continues the CRC-32 `value` over a buffer, as `zlib.crc32` does, with the processor's
/// carry-less multiplication where it has one.
///
/// The interpreter is released: no other thread may write to the buffer meanwhile.
#[pyfunction]
#[pyo3(signature = (data, value=0, /))]
pub fn crc32(py: Python<'_>, data: PyBuffer<u8>, value: u32) -> PyResult<u32> {
    if !data.is_c_contiguous() {
        return Err(PyBufferError::new_err("crc32 needs a contiguous buffer"));
    }
    if data.len_bytes() == 0 {
        return Ok(value); // its pointer may be null
    }
    // SAFETY: `data` keeps the memory exported until this function returns, contiguous, of that
    // many bytes. By the contract above no thread writes to it.
    let bytes = unsafe { slice::from_raw_parts(data.buf_ptr().cast::<u8>(), data.len_bytes()) };
    Ok(invoke::detached(py, || {
        let mut hasher = Hasher::new_with_initial(value);
        hasher.update(bytes);
        hasher.finalize()
    }))
}
