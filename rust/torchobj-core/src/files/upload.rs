//! Uploads one file to an object: in one request, or in parts that are read while others are sent. A FIFO and a file whose size is
//! not known are read to their ends.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use super::counters::Counters;
use super::local::in_place;
use super::source::SourceFile;
use super::{FileState, Transferred, mtime, same};
use crate::buffer::Buffer;
use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::policy::ReservedMemory;
use crate::read::{ReadRequest, parts};
use crate::types::{ByteRange, ChecksumAlgorithm, Payload, PutOptions, Version};
use crate::upload::{Session, Writer};

/// A file to upload.
#[derive(Debug)]
pub struct UploadFile {
    /// The file, also a FIFO. Symbolic links are followed.
    pub path: PathBuf,
    /// The object.
    pub key: String,
    /// Attributes and condition.
    pub options: PutOptions,
    /// Whether an object that is equal to the file is kept.
    pub skip_unchanged: bool,
}

/// The bytes of a part, which are counted once they are sent.
struct Held {
    buffer: Buffer,
    counters: Arc<Counters>,
    _reserved: ReservedMemory,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_slice()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.counters.add(self.buffer.len() as u64);
    }
}

impl Client {
    /// Uploads a file, and counts it as the only one of the transfer. The object appears when it is complete.
    ///
    /// # Errors
    /// Those of [`put`](Self::put); `Changed` if the file changed meanwhile, and errors of the file system.
    pub async fn upload_one(self: &Arc<Self>, upload: UploadFile, counters: &Arc<Counters>) -> Result<Transferred> {
        // The transfer checks it again.
        if let Ok(metadata) = in_place(|| std::fs::metadata(&upload.path)) {
            counters.found(metadata.len());
            // The size of a FIFO, and of a file of `/proc`, is known at its end.
            if metadata.len() > 0 {
                counters.found_all();
            }
        }
        let done = self.upload_file(upload, counters).await?;
        counters.found_all();
        counters.done(done.size, done.skipped);
        Ok(done)
    }

    /// Uploads a file. The object appears when it is complete.
    ///
    /// # Errors
    /// Those of [`put`](Self::put); `Changed` if the file changed meanwhile, and errors of the file system.
    pub(super) async fn upload_file(
        self: &Arc<Self>,
        upload: UploadFile,
        counters: &Arc<Counters>,
    ) -> Result<Transferred> {
        let UploadFile { path, key, mut options, skip_unchanged } = upload;
        self.store().check_key(Operation::Put, &key)?;
        self.check_condition(Operation::Put, &key, &options.condition)?;
        let source = in_place(|| SourceFile::open(&path))?;
        let (size, metadata) = (source.size, source.file.metadata());
        let file = metadata.map(|metadata| FileState::of(&metadata)).map_err(|error| source.failed(error))?;
        if skip_unchanged
            && !source.has_unknown_size
            && let Some(version) = self.same_object(&key, &source).await?
        {
            return Ok(Transferred { size, version, skipped: true, file: None });
        }
        let capabilities = self.store().capabilities();
        let metadata = &mut options.attributes.metadata;
        if capabilities.attributes && metadata.iter().all(|(name, _)| !name.eq_ignore_ascii_case(mtime::NAME)) {
            metadata.push((mtime::NAME.to_owned(), source.mtime.text()));
            metadata.sort();
        }
        if source.has_unknown_size {
            return self.upload_to_end(&key, &source, options, counters).await;
        }
        let version = if size < self.whole_below_bytes() {
            let crc32 = capabilities.checksums.contains(&ChecksumAlgorithm::Crc32);
            options.checksum = crc32.then_some(ChecksumAlgorithm::Crc32);
            let payload = self.read_file(&source, 0..size, crc32, counters).await?;
            in_place(|| source.check_unchanged())?;
            self.put_whole(&key, &payload, &options).await?
        } else {
            let mut uploaded = self.upload_parts(&key, &source, &options, counters).await;
            if self.lost_session(&uploaded) {
                uploaded = self.upload_parts(&key, &source, &options, counters).await;
            }
            uploaded?
        };
        Ok(Transferred { size, version: Some(version), skipped: false, file: Some(file) })
    }

    /// Uploads a file whose size is not known before its end.
    async fn upload_to_end(
        self: &Arc<Self>,
        key: &str,
        source: &SourceFile,
        options: PutOptions,
        counters: &Arc<Counters>,
    ) -> Result<Transferred> {
        counters.lost_size(source.size);
        let mut writer = Writer::new(self.clone(), key, options)?;
        let version = match copy_to_end(source, &mut writer, counters).await {
            Ok(()) => writer.close().await?,
            Err(error) => {
                writer.abort().await;
                return Err(error);
            }
        };
        Ok(Transferred { size: writer.position(), version: Some(version), skipped: false, file: None })
    }

    async fn upload_parts(
        self: &Arc<Self>,
        key: &str,
        source: &SourceFile,
        options: &PutOptions,
        counters: &Arc<Counters>,
    ) -> Result<Version> {
        let mut session = Session::begin(self.clone(), key, options).await?;
        // Parts have the checksum that the store prefers, from which it may compute that of the object.
        for range in self.part_sizes().even(source.size) {
            let sent = async {
                let length = range.end - range.start;
                session.wait_for_capacity(length, self.policy().write_buffer_bytes.max(2 * length)).await?;
                session.send(self.read_file(source, range, false, counters).await?, length)
            };
            if let Err(error) = sent.await {
                session.abort().await;
                return Err(error);
            }
        }
        if let Err(error) = in_place(|| source.check_unchanged()) {
            session.abort().await;
            return Err(error);
        }
        session.commit(&options.condition).await
    }

    /// Returns the version of the object `key` if it is equal to the file.
    async fn same_object(self: &Arc<Self>, key: &str, source: &SourceFile) -> Result<Option<Option<Version>>> {
        let head = match self.head_with_checksum(key).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            head => head?,
        };
        let same = head.size == source.size
            && match head.checksum {
                Some(checksum) => {
                    same::has_checksum(&source.file, head.size, checksum).await.map_err(|error| source.failed(error))?
                }
                None if !self.store().capabilities().attributes => {
                    self.has_bytes_of(key, source, head.version.as_ref()).await?
                }
                None => same::mtime_of(&head.attributes, None) == Some(source.mtime),
            };
        Ok(same.then_some(head.version))
    }

    /// Returns whether an object of the same size has the bytes of the file: for stores without checksums and metadata.
    async fn has_bytes_of(self: &Arc<Self>, key: &str, source: &SourceFile, version: Option<&Version>) -> Result<bool> {
        for range in parts(0..source.size, self.policy().part_bytes) {
            let (own, _) = in_place(|| source.read(&range, false))?;
            let read = ReadRequest {
                range: Some(ByteRange::Bounded(range)),
                version: version.cloned(),
                ..ReadRequest::whole(key)
            };
            if self.get(read).await?.buffer.as_slice() != own.as_slice() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a range of a file, once there is memory for it.
    async fn read_file(
        &self,
        source: &SourceFile,
        range: Range<u64>,
        crc32: bool,
        counters: &Arc<Counters>,
    ) -> Result<Payload> {
        let reserved = self.file_memory().reserve(range.end - range.start).await;
        let (buffer, crc32) = in_place(|| source.read(&range, crc32))?;
        let bytes = Bytes::from_owner(Held { buffer, counters: counters.clone(), _reserved: reserved });
        Ok(match crc32 {
            Some(crc32) => Payload::with_crc32(vec![bytes], crc32),
            None => bytes.into(),
        })
    }
}

/// Copies a file whose size is not known to a writer.
async fn copy_to_end(source: &SourceFile, writer: &mut Writer, counters: &Counters) -> Result<()> {
    loop {
        let bytes = source.read_next().await?;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut rest = &bytes[..];
        loop {
            rest = &rest[writer.fill(rest)?..];
            if rest.is_empty() {
                break;
            }
            writer.send_part().await?;
        }
        counters.grew(bytes.len() as u64);
    }
}
