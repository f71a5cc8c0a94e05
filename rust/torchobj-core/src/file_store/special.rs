//! Writes special files: devices, FIFOs and descriptors, from their start to their end. Parts are accepted in their order.

use std::fs::Metadata;
use std::io::{self, Read};
use std::path::Path;

use crate::error::{ErrorKind, Operation, Result};
use crate::files::special::{Caller, SpecialFile, SpecialWriter, wait_for};
use crate::store::ObjectStore;
use crate::types::{Condition, Payload, PutOptions, Upload, Version};

use super::FileStore;
use super::disk::{RegularFile, has_link, version};
use crate::id::unique_id;

/// Bytes that are copied at once.
const COPY_BYTES: usize = 1 << 20;

impl FileStore {
    /// Returns the special file that a write to `key` opens; `None` if it replaces a file.
    ///
    /// # Errors
    /// `Unsupported` if the write of a special file has a condition; `InvalidKey` for a socket, and for a special file or
    /// a link to a folder below the target of a tree.
    pub(super) async fn special(
        &self,
        operation: Operation,
        key: &str,
        options: &PutOptions,
    ) -> Result<Option<SpecialFile>> {
        let (path, tree) = (self.path(key), options.tree_bytes.map(|bytes| self.path(&key[..bytes])));
        let conditional = options.condition != Condition::Always;
        let find = move || {
            let special = SpecialFile::find(&path);
            let refusal = match (&special, tree) {
                (Some(special), None) => special.refusal(conditional),
                (Some(_), Some(_)) => {
                    Some("a device, FIFO, socket or descriptor is not written by the transfer of a tree")
                }
                (None, Some(tree)) if has_link(&tree, &path) => {
                    Some("symbolic links below the target of a tree are not followed")
                }
                (None, _) => None,
            };
            Ok((special, refusal))
        };
        let (special, refusal) = self.blocking(operation, key, find).await?;
        let kind = if conditional && special.is_some() { ErrorKind::Unsupported } else { ErrorKind::InvalidKey };
        refusal.map_or(Ok(special), |reason| Err(self.error(kind, operation, key, reason)))
    }

    /// Runs work that waits for the reader of a special file, and adds the operation and the URL to its error.
    async fn waiting<T: Send + 'static>(
        &self,
        operation: Operation,
        key: &str,
        work: impl FnOnce(&Caller) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        wait_for(work).await.map_err(|error| self.io_error(operation, key, error))
    }

    /// Writes a whole object into a special file.
    pub(super) async fn write_special(
        &self,
        operation: Operation,
        key: &str,
        special: SpecialFile,
        payload: &Payload,
    ) -> Result<Version> {
        let (payload, sync) = (payload.clone(), self.config.sync);
        let write = move |caller: &Caller| {
            let mut writer = SpecialWriter::new(special);
            write_payload(&mut writer, &payload, caller)?;
            writer.finish(caller, sync)
        };
        Ok(version(&self.waiting(operation, key, write).await?))
    }

    /// Copies a file into a special file.
    pub(super) async fn copy_to_special(&self, key: &str, from: &Path, special: SpecialFile) -> Result<Version> {
        let (from, sync) = (from.to_owned(), self.config.sync);
        let copy = move |caller: &Caller| -> io::Result<Metadata> {
            let from = RegularFile::open(&from)?;
            let mut source: Box<dyn Read> = match &from.content {
                Some(content) => Box::new(&content[..]),
                None => Box::new(&from.file),
            };
            let (mut writer, mut bytes) = (SpecialWriter::new(special), vec![0; COPY_BYTES]);
            loop {
                match source.read(&mut bytes)? {
                    0 => return writer.finish(caller, sync),
                    count => writer.write(&bytes[..count], caller)?,
                }
            }
        };
        Ok(version(&self.waiting(Operation::Copy, key, copy).await?))
    }

    /// Begins an upload to a special file, which is opened by the first part.
    pub(super) fn begin_special(&self, key: &str, special: SpecialFile) -> Upload {
        let upload = Upload { sequential: true, ..Upload::of_other_client(key.to_owned(), unique_id(), None) };
        self.writers.put(&upload.id, SpecialWriter::new(special));
        upload
    }

    /// Writes the next part. Returns its size.
    pub(super) async fn write_next(&self, upload: &Upload, offset: u64, payload: &Payload) -> Result<u64> {
        let operation = Operation::PutPart;
        let mut writer = self.writers.take(&upload.id).ok_or_else(|| self.no_upload(operation, upload))?;
        if writer.written() != offset {
            let message = format!("a part at byte {offset} was sent after {} bytes", writer.written());
            return Err(self.error(ErrorKind::InvalidRequest, operation, &upload.key, &message));
        }
        let own = payload.clone();
        let write = move |caller: &Caller| write_payload(&mut writer, &own, caller).map(|()| writer);
        let writer = self.waiting(operation, &upload.key, write).await?;
        self.writers.put(&upload.id, writer);
        Ok(payload.len() as u64)
    }

    /// Ends an upload to a special file.
    pub(super) async fn end_special(&self, upload: &Upload, writer: SpecialWriter) -> Result<Version> {
        let sync = self.config.sync;
        let end = move |caller: &Caller| writer.finish(caller, sync);
        Ok(version(&self.waiting(Operation::Commit, &upload.key, end).await?))
    }
}

fn write_payload(writer: &mut SpecialWriter, payload: &Payload, caller: &Caller) -> io::Result<()> {
    payload.pieces().iter().try_for_each(|piece| writer.write(piece, caller))
}
