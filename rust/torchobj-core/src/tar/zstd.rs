//! Zstandard frames as their bytes arrive. The format: RFC 8878, section 3.1.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::buffer::Dest;

const MAGIC: u32 = 0xfd2f_b528;

/// Magic numbers of frames to skip: 0x184d2a50 to 0x184d2a5f.
const SKIPPED_MAGIC: u32 = 0x184d_2a50;

/// No block is larger (section 3.1.1.2.3).
const MAX_BLOCK_BYTES: usize = 128 << 10;

/// Decodes a stream of frames.
pub(super) struct Zstd {
    decoder: FrameDecoder,
    next: Next,
    /// The start of a frame header or block that has not arrived completely.
    partial: Vec<u8>,
    /// Whether the frame ends with a checksum.
    checksum: bool,
    frames: u64,
}

/// What follows in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Frame,
    Block,
    /// Bytes of a frame to skip.
    Skip(u32),
    /// Nothing before the decoded bytes of the last block are drained.
    Drain,
}

impl Default for Zstd {
    fn default() -> Self {
        Self { decoder: FrameDecoder::new(), next: Next::Frame, partial: Vec::new(), checksum: false, frames: 0 }
    }
}

impl Zstd {
    pub(super) fn push(&mut self, input: &[u8], read: &mut usize, dest: &mut Dest) -> Result<(), String> {
        loop {
            // What a block decodes to is drained before the next one, so the decoder holds one window and one block.
            while matches!(self.next, Next::Block | Next::Drain) && dest.remaining() > 0 {
                let count = self.decoder.read(dest.unfilled_mut()).map_err(|error| damaged(&error))?;
                if count == 0 {
                    break;
                }
                dest.advance(count);
            }
            if dest.remaining() == 0 {
                return Ok(());
            }
            if self.next == Next::Drain {
                self.end_frame()?;
            }
            if let Next::Skip(left) = &mut self.next {
                let count = (*left as usize).min(input.len() - *read);
                *read += count;
                *left -= u32::try_from(count).expect("at most `left`");
                if *left > 0 {
                    return Ok(());
                }
                (self.next, self.frames) = (Next::Frame, self.frames + 1);
            }
            if *read == input.len() {
                return Ok(());
            }
            // From the input if it contains all of it, otherwise from `partial`.
            let rest = &input[*read..];
            if self.partial.is_empty()
                && let Some(length) = self.needed(rest)?.filter(|length| *length <= rest.len())
            {
                self.decode(&rest[..length])?;
                *read += length;
                continue;
            }
            let mut partial = std::mem::take(&mut self.partial);
            // `None`: the length itself is not known yet.
            let wanted = self.needed(&partial)?.unwrap_or(partial.len() + 1);
            let count = (wanted - partial.len()).min(rest.len());
            partial.extend_from_slice(&rest[..count]);
            *read += count;
            if self.needed(&partial)?.is_some_and(|length| length == partial.len()) {
                self.decode(&partial)?;
                partial.clear();
            }
            self.partial = partial;
        }
    }

    /// Length of the frame header or block that starts with these bytes; `None` if they are too few to know it.
    fn needed(&self, bytes: &[u8]) -> Result<Option<usize>, String> {
        match self.next {
            Next::Frame => header_length(bytes, self.frames),
            _ => {
                let Some([one, two, three]) = bytes.first_chunk() else { return Ok(None) };
                let header = u32::from_le_bytes([*one, *two, *three, 0]);
                let size = (header >> 3) as usize;
                let content = match (header >> 1) & 3 {
                    0 | 2 => size,
                    1 => 1,
                    _ => return Err("zstd bytes are damaged: a block of a reserved type".to_owned()),
                };
                if size > MAX_BLOCK_BYTES {
                    return Err(format!("zstd bytes are damaged: a block of {size} bytes"));
                }
                let checksum = if header & 1 == 1 && self.checksum { 4 } else { 0 };
                Ok(Some(3 + content + checksum))
            }
        }
    }

    /// Decodes a frame header, or a block with the checksum after it.
    fn decode(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.next == Next::Frame {
            let [magic, length] =
                [&bytes[..4], &bytes[4..]].map(|field| field.first_chunk().map(|c| u32::from_le_bytes(*c)));
            if magic.is_some_and(|magic| magic & !0xf == SKIPPED_MAGIC) {
                self.next = Next::Skip(length.expect("a skipped frame begins with 8 bytes"));
                return Ok(());
            }
            self.checksum = bytes[4] & 4 != 0;
            self.decoder.reset(bytes).map_err(|error| damaged(&error))?;
            self.next = Next::Block;
            return Ok(());
        }
        // The decoder is checked by fuzzing, but a shard must not end the process by a panic in it.
        let decoder = &mut self.decoder;
        let one = BlockDecodingStrategy::UptoBlocks(1);
        let decoded = catch_unwind(AssertUnwindSafe(|| decoder.decode_blocks(bytes, one)));
        match decoded {
            // The decoder itself does not limit what a block decodes to.
            Ok(Ok(false)) if self.decoder.can_collect() > MAX_BLOCK_BYTES => {
                return Err(format!("zstd bytes are damaged: a block of more than {MAX_BLOCK_BYTES} bytes"));
            }
            Ok(Ok(last)) => self.next = if last { Next::Drain } else { Next::Block },
            Ok(Err(error)) => return Err(damaged(&error)),
            Err(_) => return Err("zstd bytes are damaged: the decoder failed".to_owned()),
        }
        Ok(())
    }

    /// Compares the checksum after all output was drained.
    fn end_frame(&mut self) -> Result<(), String> {
        let (stored, computed) = (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
        if self.checksum && stored != computed {
            return Err(format!("zstd bytes are damaged: checksum {computed:08x?}, must be {stored:08x?}"));
        }
        (self.next, self.frames) = (Next::Frame, self.frames + 1);
        Ok(())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.next == Next::Frame && self.partial.is_empty() && self.frames > 0
    }
}

fn damaged(error: &dyn std::fmt::Display) -> String {
    format!("zstd bytes are damaged: {error}")
}

/// Length of the frame header (section 3.1.1.1) that starts with these bytes; for a frame to skip, of its magic and length.
fn header_length(bytes: &[u8], frames: u64) -> Result<Option<usize>, String> {
    let Some(magic) = bytes.first_chunk().map(|magic| u32::from_le_bytes(*magic)) else { return Ok(None) };
    if magic & !0xf == SKIPPED_MAGIC {
        return Ok(Some(8));
    }
    if magic != MAGIC {
        let what = if frames == 0 {
            "bytes are not zstd: the magic number is missing"
        } else {
            "bytes after the end of the zstd stream"
        };
        return Err(what.to_owned());
    }
    let Some(descriptor) = bytes.get(4) else { return Ok(None) };
    let single_segment = descriptor & 0x20 != 0;
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content = match descriptor >> 6 {
        0 => usize::from(single_segment),
        1 => 2,
        2 => 4,
        _ => 8,
    };
    Ok(Some(5 + usize::from(!single_segment) + dictionary + content))
}
