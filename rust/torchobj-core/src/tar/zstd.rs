//! Zstandard frames as their bytes arrive, decoded by libzstd, which limits the window to 128 MiB.

use zstd_safe::{DCtx, InBuffer, OutBuffer, get_error_name};

use crate::buffer::Dest;

/// Decodes a stream of frames.
pub(super) struct Zstd {
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
    pub(super) fn push(&mut self, input: &[u8], read: &mut usize, dest: &mut Dest) -> Result<(), String> {
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

    pub(super) fn is_complete(&self) -> bool {
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
