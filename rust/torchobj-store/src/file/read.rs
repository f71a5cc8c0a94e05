//! Opening files, and finding those that are being written.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::runtime::{Handle, RuntimeFlavor};
use torchobj_core::buffer::Dest;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{ObjectStore, Opened};
use torchobj_core::types::{ByteRange, GetRequest, Version};

use super::{FileStore, TEMPORARY, version};

/// Bytes that are read at a time: after each a cancelled read ends.
const READ_BYTES: usize = 4 << 20;

/// The metadata of a file; a folder is none.
pub(super) fn file_metadata(path: &Path) -> io::Result<Metadata> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_file() { Ok(metadata) } else { Err(io::ErrorKind::NotFound.into()) }
}

struct OpenedFile {
    store: FileStore,
    key: String,
    file: Arc<File>,
    size: u64,
    version: Version,
    range: Range<u64>,
    /// Where the next read begins.
    at: u64,
}

#[async_trait]
impl Opened for OpenedFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.version)
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        while self.at < self.range.end && dest.remaining() > 0 {
            // Who reads other parts of the object beside this shall not wait for it.
            tokio::task::yield_now().await;
            let left = usize::try_from(self.range.end - self.at).unwrap_or(usize::MAX);
            let most = READ_BYTES.min(left).min(dest.remaining());
            // Nothing drops this future before the read is done: no thread is left that writes to `dest`.
            let read = in_place(|| read_at(&self.file, &mut dest.unfilled_mut()[..most], self.at));
            let count = read.map_err(|error| self.store.io_error(Operation::Get, &self.key, error))?;
            if count == 0 {
                let message = "the file became shorter while it was read";
                return Err(self.store.error(ErrorKind::Changed, Operation::Get, &self.key, message));
            }
            dest.advance(count);
            self.at += count as u64;
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

/// Does what may block on this thread, whose other tasks go elsewhere meanwhile.
fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        // There is nowhere else.
        RuntimeFlavor::CurrentThread => work(),
        _ => tokio::task::block_in_place(work),
    }
}

/// One read; 0 at the end of the file.
fn read_at(file: &File, room: &mut [u8], at: u64) -> io::Result<usize> {
    loop {
        match file.read_at(room, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

impl FileStore {
    pub(super) async fn open_file(&self, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
        let (operation, key) = (Operation::Get, request.key);
        self.check_key(operation, key)?;
        let path = self.path(key);
        let open = move || {
            let file = File::open(path)?;
            let metadata = file.metadata()?;
            if metadata.is_file() { Ok((file, metadata)) } else { Err(io::ErrorKind::NotFound.into()) }
        };
        let (file, metadata) = self.blocking(operation, key, open).await?;
        let (size, version) = (metadata.len(), version(&metadata));
        if request.version.is_some_and(|asked| *asked != version) {
            return Err(self.error(ErrorKind::Changed, operation, key, "the file changed"));
        }
        let range = ByteRange::resolve(request.range.as_ref(), size);
        let refuse = || self.error(ErrorKind::Range, operation, key, "the range begins behind the end");
        let range = range.ok_or_else(refuse)?;
        let (store, key, file) = (self.clone(), key.to_owned(), Arc::new(file));
        let at = range.start;
        Ok(Box::new(OpenedFile { store, key, file, size, version, range, at }))
    }

    /// Calls `found` with the path of every file that is being written.
    pub(super) fn each_temporary(folder: &Path, found: &mut dyn FnMut(&Path)) -> io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                Self::each_temporary(&entry.path(), found)?;
            } else if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                found(&entry.path());
            }
        }
        Ok(())
    }
}

/// Why a copy cannot be made.
pub(super) fn foreign(store: &FileStore, source: &dyn std::fmt::Display, key: &str) -> Error {
    let message = format!("cannot copy from {source}: another kind of store");
    store.error(ErrorKind::Unsupported, Operation::Copy, key, &message)
}
