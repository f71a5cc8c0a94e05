//! Opening files and listing folders.

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
use torchobj_core::types::{ByteRange, GetRequest, ListEntry, ListPage, ListRequest, Version};

use super::{FileStore, TEMPORARY, modified_ms, version};

/// Entries of one page, as S3 gives them.
const PAGE_ENTRIES: usize = 1000;

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
        let mut at = self.range.start;
        while at < self.range.end && dest.remaining() > 0 {
            // Who reads other parts of the object beside this shall not wait for it.
            tokio::task::yield_now().await;
            let left = usize::try_from(self.range.end - at).unwrap_or(usize::MAX);
            let most = READ_BYTES.min(left).min(dest.remaining());
            // Nothing drops this future before the read is done: no thread is left that writes to `dest`.
            let read = in_place(|| read_at(&self.file, &mut dest.unfilled_mut()[..most], at));
            let count = read.map_err(|error| self.store.io_error(Operation::Get, &self.key, error))?;
            if count == 0 {
                let message = "the file became shorter while it was read";
                return Err(self.store.error(ErrorKind::Changed, Operation::Get, &self.key, message));
            }
            dest.advance(count);
            at += count as u64;
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
        Ok(Box::new(OpenedFile { store, key, file, size, version, range }))
    }

    pub(super) async fn list_page(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let most = request.max_entries.map_or(PAGE_ENTRIES, |most| PAGE_ENTRIES.min(most as usize));
        let mut walk = Walk {
            prefix: request.prefix.to_owned(),
            delimiter: request.delimiter.map(str::to_owned),
            after: request.continuation.or(request.start_after).map(str::to_owned),
            most,
            page: ListPage::default(),
            last: None,
        };
        let root = self.root.clone();
        let list = move || {
            match walk.folder(&root, "") {
                // A folder that was never written to is an empty store, if it could be made.
                Err(error) if error.kind() == io::ErrorKind::NotFound && root.parent().is_some_and(Path::is_dir) => {}
                done => drop(done?),
            }
            Ok(walk.page)
        };
        self.blocking(Operation::List, request.prefix, list).await
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

/// One page of a listing, depth first in the order of whole keys.
struct Walk {
    prefix: String,
    delimiter: Option<String>,
    /// Keys and common prefixes up to this were in earlier pages.
    after: Option<String>,
    most: usize,
    page: ListPage,
    last: Option<String>,
}

impl Walk {
    /// Lists `folder`, whose keys begin with `base`; false when the page is full.
    fn folder(&mut self, folder: &Path, base: &str) -> io::Result<bool> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            // A name that is no UTF-8 is no key.
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(TEMPORARY) {
                continue;
            }
            let is_folder = std::fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_dir());
            names.push(if is_folder { format!("{name}/") } else { name });
        }
        // With its slash a folder's name sorts where its keys do.
        names.sort_unstable();
        for name in names {
            let key = format!("{base}{name}");
            let path = folder.join(&name);
            let goes_on = if name.ends_with('/') { self.subfolder(&path, &key)? } else { self.file(&path, key)? };
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn subfolder(&mut self, path: &Path, base: &str) -> io::Result<bool> {
        let below_prefix = base.starts_with(&self.prefix) || self.prefix.starts_with(base);
        // Every key of this folder sorts before the one to go on after.
        let passed = self.after.as_deref().is_some_and(|after| after > base && !after.starts_with(base));
        if !below_prefix || passed {
            return Ok(true);
        }
        match self.folder(path, base) {
            // Deleted while we were on our way, or not ours to read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            done => done,
        }
    }

    fn file(&mut self, path: &Path, key: String) -> io::Result<bool> {
        if !key.starts_with(&self.prefix) || self.after.as_deref().is_some_and(|after| key.as_str() <= after) {
            return Ok(true);
        }
        let folded = self.delimiter.as_deref().and_then(|delimiter| {
            let end = self.prefix.len() + key[self.prefix.len()..].find(delimiter)? + delimiter.len();
            Some(&key[..end])
        });
        if let Some(folded) = folded
            && (self.page.prefixes.last().is_some_and(|last| last == folded)
                || self.after.as_deref().is_some_and(|after| after.starts_with(folded)))
        {
            return Ok(true);
        }
        if self.page.entries.len() + self.page.prefixes.len() == self.most {
            self.page.continuation = self.last.take();
            return Ok(false);
        }
        if let Some(folded) = folded {
            self.last = Some(folded.to_owned());
            self.page.prefixes.push(folded.to_owned());
            return Ok(true);
        }
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => metadata,
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
        };
        self.last = Some(key.clone());
        self.page.entries.push(ListEntry {
            key,
            size: metadata.len(),
            version: Some(version(&metadata)),
            modified_ms: Some(modified_ms(&metadata)),
            storage_class: None,
        });
        Ok(true)
    }
}

/// Why a copy cannot be made.
pub(super) fn foreign(store: &FileStore, source: &dyn std::fmt::Display, key: &str) -> Error {
    let message = format!("cannot copy from {source}: another kind of store");
    store.error(ErrorKind::Unsupported, Operation::Copy, key, &message)
}
