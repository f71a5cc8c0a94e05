//! Checks untrusted pickles before Python loads them.

use pyo3::prelude::*;

/// Returns the nesting depth of the objects in a pickle; 2^32 - 1 if it cannot be determined.
#[pyfunction]
pub(crate) fn pickle_nesting(pickle: &[u8]) -> u32 {
    torchobj_core::pickle::nesting(pickle)
}
