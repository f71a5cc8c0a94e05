//! An entry of a window and its state.

use std::sync::Arc;

use crate::error::Error;
use crate::prefetch::decision::{Needed, ObjectId, Reservation};

#[derive(Debug)]
pub(super) struct WindowEntry<B, W> {
    pub(super) object: ObjectId,
    pub(super) iterator: u64,
    /// The loader that the object is read for: that of its iterator, or that of the caller.
    pub(super) loader: u64,
    pub(super) charge: u64,
    /// Bytes of the entries of the iterator that were announced before it, if it may be read together with others.
    pub(super) position: Option<u64>,
    /// Not read together with other entries, because such a read failed.
    pub(super) alone: bool,
    pub(super) state: EntryState<B>,
    /// Reserves memory for the copy of a following entry.
    pub(super) reservation: Option<Reservation>,
    pub(super) waiter: Option<W>,
}

impl<B, W> WindowEntry<B, W> {
    /// Returns whether it is queued and may be added to the read of another entry.
    pub(super) fn joins(&self) -> bool {
        matches!(self.state, EntryState::Queued) && !self.alone && self.position.is_some()
    }
}

#[derive(Debug)]
pub(super) enum EntryState<B> {
    Queued,
    Filling(Arc<Needed>),
    Following,
    Ready(B),
    Failed(Error),
}
