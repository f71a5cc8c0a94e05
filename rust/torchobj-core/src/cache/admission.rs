//! Copies what a request receives, for the cache.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;

use super::disk_cache::{DiskCache, Queued};
use super::entry::EntryKey;
use crate::buffer::{Dest, Memory, PendingBuffer};
use crate::error::Result;
use crate::store::{GetResult, ObjectChecksum};
use crate::types::{Attributes, Version};

/// The bytes that were received so far.
struct Copy {
    key: EntryKey,
    pending: PendingBuffer,
    dest: Dest,
    queued: Queued,
}

/// A response whose body is queued for the cache once all of it is received. The copy costs memory bandwidth, and recycled memory.
pub(super) struct Admission {
    inner: Box<dyn GetResult>,
    cache: Arc<DiskCache>,
    copy: Option<Copy>,
}

impl Admission {
    /// `inner`, whose body is exactly the entry `key`. Without a copy if there is no memory for it.
    pub(super) fn new(inner: Box<dyn GetResult>, cache: Arc<DiskCache>, key: EntryKey, queued: Queued) -> Self {
        let length = usize::try_from(key.length()).ok();
        let copy = length.and_then(|length| Memory::allocate(length).ok()).map(|memory| {
            let (pending, mut dest) = PendingBuffer::new(memory);
            drop(dest.split_off(usize::try_from(key.length()).expect("it was allocated")));
            Copy { key, pending, dest, queued }
        });
        Self { inner, cache, copy }
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
        let Some(mut copy) = self.copy.take() else { return self.inner.read_into(dest).await };
        let before = dest.filled();
        // What was received before an error is no entry, and the rest is another request.
        self.inner.read_into(dest).await?;
        let written = dest.written();
        copy.dest.fill(&written[written.len() - (dest.filled() - before)..]);
        if copy.dest.remaining() > 0 {
            self.copy = Some(copy);
            return Ok(());
        }
        let Copy { key, pending, dest, queued } = copy;
        let checksum = self.inner.checksum().filter(|_| key.length() == key.size);
        self.cache.write(key, pending.close(dest), checksum, queued);
        Ok(())
    }
}
