//! Decompresses a shard as its bytes arrive, one bounded block of output at a time.

use zstd_safe::{DCtx, InBuffer, OutBuffer, get_error_name};

use super::TarError;
use crate::buffer::{Buffer, Dest, Memory, PendingBuffer};

/// Maximum size of a block of output. Members within a block are views of it, so large blocks save copies.
const BLOCK_BYTES: usize = 2 << 20;

/// Minimum size of a block of output.
const MIN_BLOCK_BYTES: usize = 64 << 10;

/// How a shard is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// gzip, of any number of members.
    Gzip,
    /// Zstandard, of any number of frames, without a dictionary.
    Zstd,
}

/// Decompresses one stream.
pub(super) struct Decompressor {
    format: Format,
    /// Number of compressed bytes read.
    read: u64,
    /// The block that is being filled.
    block: Option<(PendingBuffer, Dest)>,
}

enum Format {
    Gzip(Gzip),
    Zstd(Box<Zstd>),
}

impl Decompressor {
    pub(super) fn new(compression: Compression) -> Self {
        let format = match compression {
            Compression::Gzip => Format::Gzip(Gzip::default()),
            Compression::Zstd => Format::Zstd(Box::default()),
        };
        Self { format, read: 0, block: None }
    }

    /// Number of compressed bytes read so far.
    pub(super) fn read(&self) -> u64 {
        self.read
    }

    /// Decompresses the start of `input` until a block is full or `input` ends. Returns the number of bytes read, and a
    /// block; `None` if there is no output until more input arrives.
    ///
    /// # Errors
    /// The input is not valid.
    pub(super) fn push(&mut self, input: &[u8]) -> Result<(usize, Option<Buffer>), TarError> {
        if self.block.is_none() {
            let capacity = input.len().saturating_mul(4).clamp(MIN_BLOCK_BYTES, BLOCK_BYTES);
            let memory =
                Memory::allocate(capacity).map_err(|error| self.error(format!("no memory to decompress: {error}")))?;
            self.block = Some(PendingBuffer::new(memory));
        }
        let (_, dest) = self.block.as_mut().expect("set above");
        let mut read = 0;
        let pushed = match &mut self.format {
            Format::Gzip(gzip) => gzip.push(input, &mut read, dest),
            Format::Zstd(zstd) => zstd.push(input, &mut read, dest),
        };
        let filled = dest.filled();
        self.read += read as u64;
        pushed.map_err(|reason| self.error(reason))?;
        let (pending, dest) = self.block.take().expect("set above");
        if filled == 0 {
            self.block = Some((pending, dest));
            return Ok((read, None));
        }
        Ok((read, Some(pending.close(dest))))
    }

    /// Checks that the stream is complete.
    ///
    /// # Errors
    /// It ends in the middle, or is empty.
    pub(super) fn finish(&self) -> Result<(), TarError> {
        let (name, complete) = match &self.format {
            Format::Gzip(gzip) => ("gzip", gzip.is_complete()),
            Format::Zstd(zstd) => ("zstd", zstd.is_complete()),
        };
        if complete {
            return Ok(());
        }
        Err(self.error(format!("the {name} stream ends in the middle, after {} bytes", self.read)))
    }

    fn error(&self, reason: impl Into<String>) -> TarError {
        TarError::new(self.read, reason)
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decompressor({} bytes read)", self.read)
    }
}

/// A stream of gzip members.
#[derive(Default)]
struct Gzip {
    /// The member that is being read. `None` between members.
    member: Option<flate2::Decompress>,
    /// Number of members that are complete.
    members: u64,
}

/// 32 KiB, the largest window of deflate.
const WINDOW_BITS: u8 = 15;

impl Gzip {
    fn push(&mut self, input: &[u8], read: &mut usize, dest: &mut Dest) -> Result<(), String> {
        while dest.remaining() > 0 {
            if self.member.is_none() {
                // Tapes pad with zeros.
                let zeros = input[*read..].iter().take_while(|byte| self.members > 0 && **byte == 0).count();
                *read += zeros;
                match input.get(*read) {
                    None => break,
                    Some(0x1f) => self.member = Some(flate2::Decompress::new_gzip(WINDOW_BITS)),
                    Some(_) if self.members == 0 => {
                        return Err("the bytes are not gzip: the magic number is missing".to_owned());
                    }
                    Some(_) => return Err("there are bytes after the end of the gzip stream".to_owned()),
                }
            }
            let member = self.member.as_mut().expect("set above");
            let (before_in, before_out) = (member.total_in(), member.total_out());
            let status = member.decompress(&input[*read..], dest.unfilled_mut(), flate2::FlushDecompress::None);
            let progress =
                |before: u64, now: u64| usize::try_from(now - before).expect("at most the length of a slice");
            let (consumed, produced) =
                (progress(before_in, member.total_in()), progress(before_out, member.total_out()));
            *read += consumed;
            dest.advance(produced);
            match status.map_err(|error| format!("the gzip bytes are damaged: {error}"))? {
                flate2::Status::StreamEnd => {
                    self.member = None;
                    self.members += 1;
                }
                flate2::Status::Ok | flate2::Status::BufError if consumed == 0 && produced == 0 => break,
                flate2::Status::Ok | flate2::Status::BufError => {}
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.member.is_none() && self.members > 0
    }
}

/// A stream of Zstandard frames, decoded by libzstd, which limits the window to 128 MiB.
struct Zstd {
    context: DCtx<'static>,
    /// Whether a frame has begun and not ended.
    within: bool,
    frames: u64,
}

impl Default for Zstd {
    fn default() -> Self {
        Self { context: DCtx::create(), within: false, frames: 0 }
    }
}

impl Zstd {
    /// Decodes `input` from `read` on until `dest` is full or `input` ends.
    fn push(&mut self, input: &[u8], read: &mut usize, dest: &mut Dest) -> Result<(), String> {
        // Within a frame the decoder may have output without more input.
        while dest.remaining() > 0 && (*read < input.len() || self.within) {
            let mut source = InBuffer::around(&input[*read..]);
            let mut target = OutBuffer::around(dest.unfilled_mut());
            let left = self.context.decompress_stream(&mut target, &mut source);
            let (produced, consumed) = (target.pos(), source.pos());
            *read += consumed;
            dest.advance(produced);
            let left = left.map_err(|code| self.damaged(get_error_name(code)))?;
            if left == 0 && (consumed > 0 || produced > 0) {
                (self.within, self.frames) = (false, self.frames + 1);
            } else if consumed > 0 {
                self.within = true;
            }
            if consumed == 0 && produced == 0 {
                break;
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        !self.within && self.frames > 0
    }

    fn damaged(&self, reason: &str) -> String {
        if self.within {
            return format!("the zstd bytes are damaged: {reason}");
        }
        match self.frames {
            0 => format!("the bytes are not zstd: {reason}"),
            _ => format!("there are bytes after the end of the zstd stream: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, gzip, samples, zstd};
    use super::*;

    #[test]
    fn errors_of_compressed_bytes_are_sentences() {
        let body: Vec<u8> = (0..2000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let tar = entry(b"a.x", b'0', &body);
        for (name, compression, whole) in
            [("gzip", Compression::Gzip, gzip(&tar)), ("zstd", Compression::Zstd, zstd(&tar))]
        {
            let error = |bytes: &[u8]| samples(bytes, &[], Some(compression), 0).1.unwrap_err().to_string();
            let cut = format!("offset 300: the {name} stream ends in the middle, after 300 bytes");
            assert_eq!(error(&whole[..300]), cut);
            let after = format!(": there are bytes after the end of the {name} stream");
            assert!(error(&[&whole[..], b"more bytes"].concat()).contains(&after));
            assert!(error(b"<html>").contains(&format!("offset 0: the bytes are not {name}: ")));
        }
    }
}
