//! Reads an entry: its bytes go straight into the memory of the read, and are compared with their CRCs there.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use async_trait::async_trait;

use super::disk_cache::DiskCache;
use super::entry::{BLOCK_BYTES, EntryKey, are_intact};
use crate::buffer::Dest;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::files::local::in_place;
use crate::store::{GetResult, ObjectChecksum};
use crate::types::{Attributes, Version};

/// Maximum number of bytes of one read call. A read can be cancelled between two calls.
const READ_BYTES: usize = 4 << 20;

/// The response to a read that an entry has.
pub(super) struct Hit {
    cache: Arc<DiskCache>,
    key: EntryKey,
    version: Version,
    file: File,
    /// The requested bytes of the object.
    range: Range<u64>,
    /// Position of the next byte in the file.
    at: u64,
    /// The CRC of each block, once the trailer was read.
    crcs: Option<Vec<u32>>,
    /// A block that is read in several calls, and its number.
    block: Option<(usize, Vec<u8>)>,
}

impl Hit {
    /// A read of `range` of the object, of the entry that `file` contains.
    pub(super) fn new(cache: Arc<DiskCache>, key: EntryKey, version: Version, file: File, range: Range<u64>) -> Self {
        let at = range.start - key.range.start;
        Self { cache, key, version, file, range, at, crcs: None, block: None }
    }

    /// Number of bytes that are left.
    fn left(&self) -> usize {
        usize::try_from(self.range.end - self.key.range.start - self.at).unwrap_or(usize::MAX)
    }

    /// The bytes of a block in the file.
    fn block_range(&self, block: usize) -> Range<usize> {
        let length = usize::try_from(self.key.length()).expect("entries fit into memory");
        block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(length)
    }

    /// Reads as many whole blocks into `dest` as fit, or a part of a block. `None` if the file is damaged.
    fn read(&mut self, dest: &mut Dest) -> Option<()> {
        let room = dest.remaining().min(self.left());
        let at = usize::try_from(self.at).expect("entries fit into memory");
        let mut end = at + room.min(READ_BYTES);
        if end as u64 != self.key.length() {
            end -= end % BLOCK_BYTES;
        }
        let count = if at % BLOCK_BYTES == 0 && end > at {
            self.read_blocks(&mut dest.unfilled_mut()[..end - at], at)?;
            dest.advance(end - at);
            end - at
        } else if room > 0 {
            let number = at / BLOCK_BYTES;
            let range = self.block_range(number);
            let block = match self.block.take() {
                Some((found, block)) if found == number => block,
                _ => {
                    let mut block = vec![0; range.len()];
                    self.read_blocks(&mut block, range.start)?;
                    block
                }
            };
            let count = dest.fill(&block[at - range.start..][..room.min(range.end - at)]);
            self.block = Some((number, block));
            count
        } else {
            // Of an empty object, the trailer is compared.
            self.read_blocks(&mut [], at)?;
            0
        };
        self.at += count as u64;
        Some(())
    }

    /// Reads whole blocks from `at`, and compares them. `None` if the file is damaged.
    fn read_blocks(&mut self, bytes: &mut [u8], at: usize) -> Option<()> {
        if self.crcs.is_none() {
            let mut trailer = vec![0; self.key.trailer_bytes()];
            let length = usize::try_from(self.key.length()).ok()?;
            if at + bytes.len() == length {
                // One access of the disk for both.
                let mut both = [IoSliceMut::new(bytes), IoSliceMut::new(&mut trailer)];
                read_exact_at(&self.file, &mut both, at as u64).ok()?;
                self.crcs = Some(self.key.block_crcs(&trailer)?);
                return self.compare(bytes, at);
            }
            read_exact_at(&self.file, &mut [IoSliceMut::new(&mut trailer)], self.key.length()).ok()?;
            self.crcs = Some(self.key.block_crcs(&trailer)?);
        }
        read_exact_at(&self.file, &mut [IoSliceMut::new(bytes)], at as u64).ok()?;
        self.compare(bytes, at)
    }

    fn compare(&self, bytes: &[u8], at: usize) -> Option<()> {
        are_intact(bytes, &self.crcs.as_ref()?[at / BLOCK_BYTES..]).then_some(())
    }
}

#[async_trait]
impl GetResult for Hit {
    fn size(&self) -> u64 {
        self.key.size
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

    /// Nothing is written to `dest` that does not have its CRC.
    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        loop {
            if self.read(dest).is_none() {
                self.cache.remove_damaged(&self.key);
                let message = "the file of the disk cache is damaged";
                return Err(Error::new(ErrorKind::Io, Operation::Get, &*self.key.url, message));
            }
            if self.left() == 0 || dest.remaining() == 0 {
                return Ok(());
            }
            // Lets other tasks of this thread run between two reads.
            tokio::task::yield_now().await;
        }
    }
}

/// Fills `buffers` from `at`. What is in memory is read at once; only a read that waits for the disk moves the other tasks of
/// this thread to another one.
fn read_exact_at(file: &File, buffers: &mut [IoSliceMut<'_>], at: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let wanted = buffers.iter().map(|buffer| buffer.len()).sum::<usize>();
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        if rustix::io::preadv2(file, buffers, at, flags).is_ok_and(|count| count == wanted) {
            return Ok(());
        }
    }
    in_place(|| {
        let mut at = at;
        for buffer in buffers {
            file.read_exact_at(buffer, at)?;
            at += buffer.len() as u64;
        }
        Ok(())
    })
}
