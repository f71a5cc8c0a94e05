//! A local file that is uploaded: read in parts, and checked for changes; or read to its end, if its size is not known.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use rustix::event::PollFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::local::{error_of, url_of};
use super::mtime::Mtime;
use super::pseudo::has_unknown_size;
use super::special::{Caller, wait_for};
use crate::buffer::{Buffer, Memory, PendingBuffer};
use crate::error::{Error, ErrorKind, Operation, Result};

/// Bytes read by one call: their checksum is computed while they are in the cache.
const BLOCK_BYTES: usize = 256 << 10;

/// Maximum number of bytes that are read at once from a file whose size is not known.
const NEXT_BYTES: usize = 1 << 20;

/// A file that is open for reading.
#[derive(Debug)]
pub(super) struct SourceFile {
    path: PathBuf,
    pub(super) file: Arc<File>,
    /// Size in bytes, as the file system has it.
    pub(super) size: u64,
    /// Whether the file must be read to its end to know its size.
    pub(super) has_unknown_size: bool,
    pub(super) mtime: Mtime,
}

impl SourceFile {
    /// Opens a regular file or a FIFO.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, or `InvalidKey` if it is a folder, a device or a socket.
    pub(super) fn open(path: &Path) -> Result<Self> {
        // Opening a FIFO would wait for a writer.
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let opened = opened.and_then(|file| file.metadata().map(|metadata| (file, metadata)));
        let (file, metadata) = opened.map_err(|error| error_of(Operation::Get, path, error))?;
        let is_fifo = metadata.file_type().is_fifo();
        if !metadata.is_file() && !is_fifo {
            let message =
                "not a regular file; torchobj.files.upload_stream reads devices, torchobj.files.upload folders";
            return Err(Error::new(ErrorKind::InvalidKey, Operation::Get, url_of(path), message));
        }
        let unknown =
            is_fifo || has_unknown_size(&file, &metadata).map_err(|error| error_of(Operation::Get, path, error))?;
        Ok(Self {
            path: path.to_owned(),
            file: Arc::new(file),
            size: metadata.len(),
            has_unknown_size: unknown,
            mtime: mtime_of(&metadata),
        })
    }

    /// Reads the next bytes of a file whose size is not known, at most 1 MiB; none at its end. Waits for the writer of a FIFO.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) async fn read_next(&self) -> Result<Vec<u8>> {
        let file = self.file.clone();
        let read = move |caller: &Caller| loop {
            caller.wait_for(&file, PollFlags::IN)?;
            let mut bytes = vec![0; NEXT_BYTES];
            match rustix::io::read(&*file, &mut bytes) {
                Ok(count) => {
                    bytes.truncate(count);
                    return Ok(bytes);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        wait_for(read).await.map_err(|error| self.failed(error))
    }

    pub(super) fn failed(&self, error: io::Error) -> Error {
        error_of(Operation::Get, &self.path, error)
    }

    /// Returns an error if size or time of modification of the file have changed since it was opened.
    ///
    /// # Errors
    /// `Changed`.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| self.failed(error))?;
        if (now.len(), mtime_of(&now)) == (self.size, self.mtime) {
            return Ok(());
        }
        let message = format!(
            "the file changed while it was uploaded: it had {} bytes and now has {}; nothing was written",
            self.size,
            now.len()
        );
        Err(Error::new(ErrorKind::Changed, Operation::Get, url_of(&self.path), message))
    }

    /// Reads a range, and computes its CRC-32 if `crc32`.
    ///
    /// # Errors
    /// `Changed` if the file became shorter.
    pub(super) fn read(&self, range: &Range<u64>, crc32: bool) -> Result<(Buffer, Option<u32>)> {
        let length = usize::try_from(range.end - range.start).expect("a part fits the address space");
        let memory = Memory::allocate(length).map_err(|error| self.failed(error))?;
        let (pending, mut dest) = PendingBuffer::new(memory);
        let mut digest = crc32.then(|| Digest::new(CrcAlgorithm::Crc32IsoHdlc));
        while dest.remaining() > 0 {
            let at = range.start + dest.filled() as u64;
            let max = dest.remaining().min(BLOCK_BYTES);
            let block = &mut dest.unfilled_mut()[..max];
            let count = match self.file.read_at(block, at) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                count => count.map_err(|error| self.failed(error))?,
            };
            if count == 0 {
                self.check_unchanged()?;
                return Err(self.failed(io::ErrorKind::InvalidData.into()));
            }
            if let Some(digest) = &mut digest {
                digest.update(&block[..count]);
            }
            dest.advance(count);
        }
        let crc32 = digest.map(|digest| u32::try_from(digest.finalize()).expect("a CRC-32 has 32 bits"));
        Ok((pending.close(dest), crc32))
    }
}

/// The time of modification of a file.
pub(super) fn mtime_of(metadata: &Metadata) -> Mtime {
    Mtime::new(metadata.mtime(), metadata.mtime_nsec())
}
