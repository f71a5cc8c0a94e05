//! A request of a worker, and how its objects are written into its slot and read from it: all as numbers, or all as
//! serialized references. `layout` has the slot itself.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::layout::{MAX_NAME_BYTES, MAX_OBJECTS, WorkerSlot};
use crate::object_ref::ObjectRef;
use crate::source_key::SourceKey;

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
    /// Demanded objects: the worker waits for them. `None` for what is malformed: a bug of the worker.
    pub objects: Vec<Option<SourceKey>>,
    /// Announced objects, in the order of use.
    pub announced: Vec<Option<SourceKey>>,
    /// Iterator that announced them; the worker assigns this number. Of a request for a block: the number of the worker.
    pub iterator: u32,
    /// Iterator that ended: its announced objects are not needed any more.
    pub ended: Option<u32>,
}

impl WorkerRequest {
    /// The lengths of a request for a block, which are written like indices.
    pub(super) fn lengths(&self) -> Vec<u64> {
        let length = |object: &Option<SourceKey>| match object {
            Some(SourceKey::Index(length)) => Some(*length),
            _ => None,
        };
        self.objects.iter().map_while(length).collect()
    }
}

/// Writes the first of these objects to a slot: as many as fit, and are of one kind. Returns how many.
///
/// # Panics
/// The first one exceeds the size of a request, 32 KiB.
pub(super) fn write_objects(slot: &WorkerSlot, objects: &[&SourceKey]) -> usize {
    let indices =
        || objects.iter().map_while(|object| if let SourceKey::Index(index) = object { Some(*index) } else { None });
    match objects.first() {
        Some(SourceKey::Ref(_)) => {
            let names = objects
                .iter()
                .map_while(|object| if let SourceKey::Ref(name) = object { Some(name.to_bytes()) } else { None });
            let (bytes, count) = join_names(names);
            assert!(count > 0, "a reference exceeds the size of a request");
            slot.write_names(&bytes);
            count
        }
        _ => slot.write_numbers(indices()),
    }
}

/// Reads `count` objects that [`write_objects`] wrote.
pub(super) fn read_objects(slot: &WorkerSlot, count: usize) -> Vec<Option<SourceKey>> {
    match slot.read_names() {
        bytes if bytes.is_empty() => {
            slot.objects[..count].iter().map(|object| Some(SourceKey::Index(object.load(Relaxed)))).collect()
        }
        bytes => split_names(&bytes, count)
            .map(|name| Some(SourceKey::Ref(Arc::new(ObjectRef::from_bytes(name?)?))))
            .collect(),
    }
}

/// Joins names, each preceded by its length in two bytes. Returns the bytes, and how many of the names fit in a request.
fn join_names(names: impl Iterator<Item = Vec<u8>>) -> (Vec<u8>, usize) {
    let (mut bytes, mut count) = (Vec::new(), 0);
    for name in names {
        if count == MAX_OBJECTS || bytes.len() + 2 + name.len() > MAX_NAME_BYTES {
            break;
        }
        bytes.extend_from_slice(&u16::try_from(name.len()).expect("at most 32 KiB").to_le_bytes());
        bytes.extend_from_slice(&name);
        count += 1;
    }
    (bytes, count)
}

/// Splits `count` names that [`join_names`] joined; `None` where there are fewer.
fn split_names(mut bytes: &[u8], count: usize) -> impl Iterator<Item = Option<&[u8]>> {
    let mut next = move || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(name)
    };
    (0..count).map(move |_| next())
}
