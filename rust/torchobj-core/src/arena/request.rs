//! A request of a worker, parsed from its slot by the owner. `layout` reads the slot itself.

/// A request of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of the worker's slot.
    pub slot: u32,
    pub(super) number: u32,
    /// Number of the source that the objects belong to.
    pub source: u64,
    /// Demanded objects: the worker waits for them.
    pub objects: RequestedObjects,
    /// Announced objects, in the order of use; empty when objects are identified by names.
    pub announced: Vec<u64>,
    /// Iterator that announced them; the worker assigns this number.
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

/// Splits `count` names, each preceded by its length in two bytes.
pub(super) fn split_names(mut bytes: &[u8], count: usize) -> Vec<Option<Vec<u8>>> {
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(name.to_vec())
    };
    (0..count).map(|_| next()).collect()
}
