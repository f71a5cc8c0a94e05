//! Pickles of others, measured before Python reads them.

use pyo3::prelude::*;

/// How deep the objects of a pickle nest; 2^32 - 1 where that is not known.
#[pyfunction]
pub(crate) fn pickle_nesting(pickle: &[u8]) -> u32 {
    torchobj_core::pickle::nesting(pickle)
}
