//! Copies what a request receives, for the cache.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;

use super::disk_cache::{DiskCache, Queued};
use super::entry::EntryKey;
use crate::buffer::{Dest, Memory, PendingBuffer};
use crate::error::Result;
use crate::store::{GetResult, ObjectChecksum};
use crate::types::{Attributes, Version};

/// The bytes of an entry that were received so far.
struct EntryCopy {
    pending: PendingBuffer,
    dest: Dest,
    queued: Queued,
}

/// A response whose bytes are queued for the cache, each entry once all of it is received. The copy costs memory bandwidth, and
/// recycled memory.
pub(super) struct Admission {
    inner: Box<dyn GetResult>,
    cache: Arc<DiskCache>,
    /// The entries that are not complete, ascending and without overlaps.
    entries: VecDeque<EntryKey>,
    /// The copy of the first of them; `None` before its first byte, and if it is not admitted.
    copy: Option<EntryCopy>,
    /// Position of the next byte in the object.
    at: u64,
}

impl Admission {
    /// `inner`, whose body contains `entries`, which are ascending and do not overlap.
    pub(super) fn new(inner: Box<dyn GetResult>, cache: Arc<DiskCache>, entries: VecDeque<EntryKey>) -> Self {
        let at = inner.range().start;
        Self { inner, cache, entries, copy: None, at }
    }

    /// Copies the next bytes of the body.
    fn copy(&mut self, bytes: &[u8]) {
        let received = self.at..self.at + bytes.len() as u64;
        self.at = received.end;
        while let Some(key) = self.entries.front() {
            let start = key.range.start.max(received.start);
            let end = key.range.end.min(received.end);
            if start >= end && !key.range.is_empty() {
                return;
            }
            if start == key.range.start {
                self.copy = EntryCopy::begin(&self.cache, key);
                if self.copy.is_none() {
                    self.cache.drop_one();
                }
            }
            if let Some(copy) = &mut self.copy {
                let index = |at: u64| usize::try_from(at - received.start).expect("the bytes are in memory");
                copy.dest.fill(&bytes[index(start)..index(end)]);
            }
            if end < key.range.end {
                return;
            }
            let key = self.entries.pop_front().expect("it has a first entry");
            if let Some(EntryCopy { pending, dest, queued }) = self.copy.take() {
                let checksum = self.inner.checksum().filter(|_| key.length() == key.size);
                self.cache.write(key, pending.close(dest), checksum, queued);
            }
        }
    }
}

impl EntryCopy {
    /// A copy of an entry; `None` if it is not admitted, or if there is no memory for it.
    fn begin(cache: &DiskCache, key: &EntryKey) -> Option<Self> {
        let queued = cache.admit(key)?;
        let length = usize::try_from(key.length()).ok()?;
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(length).ok()?);
        drop(dest.split_off(length));
        Some(Self { pending, dest, queued })
    }
}

#[async_trait]
impl GetResult for Admission {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn version(&self) -> Option<&Version> {
        self.inner.version()
    }

    fn range(&self) -> Range<u64> {
        self.inner.range()
    }

    fn attributes(&self) -> Attributes {
        self.inner.attributes()
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        self.inner.checksum()
    }

    fn has_length(&self) -> bool {
        self.inner.has_length()
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        let before = dest.filled();
        if let Err(error) = self.inner.read_into(dest).await {
            // What was received before it is no entry, and the rest is another request.
            self.entries.clear();
            self.copy = None;
            return Err(error);
        }
        if !self.entries.is_empty() {
            let written = dest.written();
            self.copy(&written[written.len() - (dest.filled() - before)..]);
        }
        Ok(())
    }
}
