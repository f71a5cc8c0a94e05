//! Reads files.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::buffer::Dest;
use crate::error::{ErrorKind, Operation, Result};
use crate::files::local::in_place;
use crate::store::{GetResult, ObjectChecksum, ObjectStore};
use crate::types::{Attributes, ByteRange, GetRequest, Version};
use async_trait::async_trait;
use bytes::Bytes;

use super::FileStore;
use super::disk::{RegularFile, version};

/// Maximum number of bytes of one read call. A read can be cancelled between two calls.
const READ_BYTES: usize = 4 << 20;

struct FileGetResult {
    store: FileStore,
    key: String,
    file: Arc<File>,
    /// All bytes, if they are in memory.
    content: Option<Bytes>,
    size: u64,
    version: Version,
    range: Range<u64>,
    /// Position of the next read.
    at: u64,
}

#[async_trait]
impl GetResult for FileGetResult {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.version)
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn attributes(&self) -> Attributes {
        Attributes::default()
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        None
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        if let Some(content) = &self.content {
            let [from, to] = [self.at, self.range.end].map(|at| usize::try_from(at).expect("in memory"));
            self.at += dest.fill(&content[from..to]) as u64;
            return Ok(());
        }
        while self.at < self.range.end && dest.remaining() > 0 {
            // Lets other tasks of this thread run between two reads.
            tokio::task::yield_now().await;
            let left = usize::try_from(self.range.end - self.at).unwrap_or(usize::MAX);
            let max = READ_BYTES.min(left).min(dest.remaining());
            // The read ends before this future can be dropped, so no thread writes to `dest` afterwards.
            let read = in_place(|| read_at(&self.file, &mut dest.unfilled_mut()[..max], self.at));
            let count = read.map_err(|error| self.store.io_error(Operation::Get, &self.key, error))?;
            if count == 0 {
                let message = "the file became shorter while it was read";
                return Err(self.store.error(ErrorKind::Changed, Operation::Get, &self.key, message));
            }
            dest.advance(count);
            self.at += count as u64;
        }
        if self.at < self.range.end {
            return Ok(());
        }
        let file = self.file.clone();
        let now = self.store.blocking(Operation::Get, &self.key, move || file.metadata()).await?;
        if version(&now) != self.version {
            let message = "the file was rewritten while it was read";
            return Err(self.store.error(ErrorKind::Changed, Operation::Get, &self.key, message));
        }
        Ok(())
    }
}

/// Reads once; returns 0 at the end of the file.
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    loop {
        match file.read_at(buffer, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

impl FileStore {
    pub(super) async fn open_file(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let (operation, key) = (Operation::Get, request.key);
        self.check_key(operation, key)?;
        let path = self.path(key);
        let opened = self.blocking(operation, key, move || RegularFile::open(&path)).await?;
        let (size, version) = (opened.size(), opened.version());
        if request.version.is_some_and(|expected| *expected != version) {
            return Err(self.error(ErrorKind::Changed, operation, key, "the file changed"));
        }
        let range = ByteRange::resolve(request.range.as_ref(), size);
        let error = || self.error(ErrorKind::Range, operation, key, "the range begins after the end of the file");
        let range = range.ok_or_else(error)?;
        let (store, key, file, content) = (self.clone(), key.to_owned(), Arc::new(opened.file), opened.content);
        let at = range.start;
        Ok(Box::new(FileGetResult { store, key, file, content, size, version, range, at }))
    }
}
