//! Views of one finished read, such as the members of a tar shard: buffers that share its memory.
#![expect(unsafe_code, reason = "makes regions within a region; each use states its invariant")]

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Buffer, Memory};

/// Bytes that several buffers share. The memory is freed with the last of them.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    start: NonNull<u8>,
    len: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region is only read, and `keep`, which keeps it alive, is `Send + Sync`.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> Self {
        let (start, len) = (buffer.start(), buffer.len());
        Self { start, len, keep: Arc::new(buffer) }
    }
}

impl SharedBuffer {
    /// Bytes that `keep` keeps alive, for bindings.
    ///
    /// # Safety
    /// `start..start + len` is initialised and neither moved nor freed until `keep` is dropped. No Rust reference writes to
    /// it until then.
    pub unsafe fn kept(start: NonNull<u8>, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, keep }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `keep` keeps `len` initialised bytes at `start`, and no reference writes to them (`kept`; for a `Buffer`:
        // it was moved into `keep`).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// A buffer of some of the bytes, which shares their memory. Does not allocate.
    ///
    /// # Panics
    /// The range is not within the bytes.
    pub fn view(&self, range: Range<usize>) -> Buffer {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let len = range.len();
        // SAFETY: `range` is within the region (checked above), which `keep` keeps alive, and which no `Dest` and no
        // reference writes to (as in `as_slice`).
        let memory = unsafe { Memory::shared(self.start.add(range.start), len, self.keep.clone()) };
        Buffer::over(memory, len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::PendingBuffer;
    use super::*;

    fn read(bytes: &[u8], back: mpsc::Sender<Vec<u8>>) -> Buffer {
        let (pending, mut dest) = PendingBuffer::new(Memory::sent_back(bytes.len(), back));
        dest.fill(bytes);
        drop(dest);
        pending.finish(bytes.len()).unwrap()
    }

    #[test]
    fn views_keep_the_memory_until_the_last_one_is_dropped() {
        let (back, freed) = mpsc::channel();
        let shared = SharedBuffer::from(read(b"head and body", back));
        let (head, body) = (shared.view(0..4), shared.view(9..13));
        drop(shared);
        assert_eq!((head.as_slice(), body.as_slice()), (&b"head"[..], &b"body"[..]));
        let part = SharedBuffer::from(body).view(1..3);
        drop(head);
        assert!(freed.try_recv().is_err());
        assert_eq!(part.as_slice(), b"od");
        drop(part);
        assert_eq!(freed.try_recv().unwrap(), b"head and body");
    }

    #[test]
    #[should_panic(expected = "3..14 of 13 bytes")]
    fn a_view_cannot_exceed_the_buffer() {
        let (back, _freed) = mpsc::channel();
        let _ = SharedBuffer::from(read(b"head and body", back)).view(3..14);
    }

    #[test]
    #[should_panic(expected = "other buffers share this memory")]
    fn a_view_cannot_be_written_through_a_reference() {
        let (back, _freed) = mpsc::channel();
        let _ = SharedBuffer::from(read(b"head and body", back)).view(0..4).as_mut_slice();
    }
}
