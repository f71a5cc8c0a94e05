//! A request of a worker, parsed from its slot by the owner, and the form of names in it. `layout` reads the slot
//! itself.

use super::layout::{MAX_NAME_BYTES, MAX_OBJECTS};

/// A request of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRequest {
    /// Index of the worker's slot.
    pub slot: u32,
    /// Identity of the worker's process, as of [`fork::generation`](crate::fork::generation).
    pub worker: u64,
    /// The loader that the worker belongs to.
    pub loader: u64,
    pub(super) number: u32,
    /// Number of the source that the objects belong to.
    pub source: u64,
    /// Demanded objects: the worker waits for them.
    pub objects: RequestedObjects,
    /// Announced objects, in the order of use.
    pub announced: RequestedObjects,
    /// Iterator that announced them; the worker assigns this number. Of a request for a block: the number of the worker.
    pub iterator: u32,
    /// Iterator that ended: its announced objects are not needed any more.
    pub ended: Option<u32>,
}

/// The objects of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestedObjects {
    /// Identified by number.
    Numbers(Vec<u64>),
    /// Identified by name; `None` where the worker wrote fewer names than it counted.
    Names(Vec<Option<Vec<u8>>>),
}

impl RequestedObjects {
    /// Number of objects.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Names(names) => names.len(),
        }
    }

    /// Returns whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Joins names, each preceded by its length in two bytes. Returns the bytes, and how many of the names fit in a request.
pub(super) fn join_names(names: &[&[u8]]) -> (Vec<u8>, usize) {
    let mut bytes = Vec::new();
    for (count, name) in names.iter().enumerate() {
        if count == MAX_OBJECTS || bytes.len() + 2 + name.len() > MAX_NAME_BYTES {
            return (bytes, count);
        }
        bytes.extend_from_slice(&u16::try_from(name.len()).expect("at most 32 KiB").to_le_bytes());
        bytes.extend_from_slice(name);
    }
    (bytes, names.len())
}

/// Splits `count` names that [`join_names`] joined.
pub(super) fn split_names(mut bytes: &[u8], count: usize) -> Vec<Option<Vec<u8>>> {
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(name.to_vec())
    };
    (0..count).map(|_| next()).collect()
}
