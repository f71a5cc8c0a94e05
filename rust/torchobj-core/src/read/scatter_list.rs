//! Distributes the bytes of one request to the memory of their ranges.
//!
//! Fragments of different ranges are in unrelated memory. A large fragment is received directly into its memory. Small
//! fragments, and the gaps between fragments, are received into an intermediate strip and copied: a system call for each
//! would cost more than the copy. If checksums are requested, large fragments are received in strips too, so that each
//! byte is summed while it is in the cache.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::buffer::{Dest, Memory, PendingBuffer, ReceivedBytes};
use crate::crc32::Crc32;
use crate::engine::Sink;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::GetResult;

/// Fragments of at least this size are received directly.
const DIRECT_BYTES: usize = 64 << 10;

/// Size of a strip: a part of a core's cache.
const STRIP_BYTES: usize = 256 << 10;

/// A fragment: the memory for its bytes.
#[derive(Debug)]
pub(super) struct FragmentSink {
    /// Bytes before it that are discarded.
    pub(super) gap_bytes: usize,
    /// Index of its range.
    pub(super) index: usize,
    pub(super) dest: Dest,
}

impl FragmentSink {
    fn is_direct(&self) -> bool {
        self.gap_bytes == 0 && self.dest.len() >= DIRECT_BYTES
    }
}

/// Bytes that are received in one read.
#[derive(Debug)]
struct Strip {
    dest: Dest,
    contents: Contents,
}

#[derive(Debug)]
enum Contents {
    /// Bytes of this range, in its own memory.
    Range(usize),
    /// Fragments to copy.
    Copies(Vec<Copied>),
}

/// A fragment in an intermediate strip.
#[derive(Debug)]
struct Copied {
    at: usize,
    index: usize,
    dest: Dest,
}

/// Receives the bytes of a part, strip by strip.
#[derive(Debug)]
pub(super) struct ScatterList {
    /// Fragments after the current strip.
    fragments: VecDeque<FragmentSink>,
    strip: Option<Strip>,
    /// Bytes of the completed strips.
    completed_bytes: usize,
    length: usize,
    /// Checksums of the bytes of each range, in their order; `None` if not requested.
    sums: Option<Vec<(usize, Crc32)>>,
    /// Size of the whole object, from its last response; 0 before the first.
    pub(super) size: u64,
    progress: ReceivedBytes,
    /// Counts the bytes of ranges in the completed strips of all parts of the read.
    arrived: ReceivedBytes,
    url: Arc<str>,
}

impl ScatterList {
    /// A sink for `fragments`, with the gaps before them, of the object at `url`.
    pub(super) fn new(
        fragments: VecDeque<FragmentSink>,
        checksum: bool,
        url: Arc<str>,
        arrived: ReceivedBytes,
    ) -> Self {
        let length = fragments.iter().map(|fragment| fragment.gap_bytes + fragment.dest.len()).sum();
        Self {
            fragments,
            strip: None,
            completed_bytes: 0,
            length,
            sums: checksum.then(Vec::new),
            size: 0,
            progress: ReceivedBytes::default(),
            arrived,
            url,
        }
    }

    /// Checksums of the bytes of this part, by index of the range.
    pub(super) fn into_sums(self) -> Vec<(usize, Crc32)> {
        self.sums.unwrap_or_default()
    }

    /// The next strip; `None` after the last.
    fn next(&mut self) -> Result<Option<Strip>> {
        let Some(fragment) = self.fragments.front_mut() else { return Ok(None) };
        if !fragment.is_direct() {
            return self.intermediate_strip().map(Some);
        }
        let whole = self.sums.is_none() || fragment.dest.len() < STRIP_BYTES + DIRECT_BYTES;
        let dest = fragment.dest.split_to(if whole { fragment.dest.len() } else { STRIP_BYTES });
        let contents = Contents::Range(fragment.index);
        if whole {
            self.fragments.pop_front();
        }
        Ok(Some(Strip { dest, contents }))
    }

    /// An intermediate strip for gaps and small fragments, up to the next fragment that is received directly.
    fn intermediate_strip(&mut self) -> Result<Strip> {
        let (mut copies, mut at) = (Vec::new(), 0);
        while at < STRIP_BYTES
            && let Some(fragment) = self.fragments.front_mut().filter(|fragment| !fragment.is_direct())
        {
            let gap_bytes = fragment.gap_bytes.min(STRIP_BYTES - at);
            fragment.gap_bytes -= gap_bytes;
            at += gap_bytes;
            if fragment.gap_bytes > 0 || fragment.is_direct() {
                continue;
            }
            let dest = fragment.dest.split_to(fragment.dest.len().min(STRIP_BYTES - at));
            let length = dest.len();
            copies.push(Copied { at, index: fragment.index, dest });
            at += length;
            if fragment.dest.is_empty() {
                self.fragments.pop_front();
            }
        }
        let memory = Memory::allocate(at).map_err(|source| {
            let message = format!("no memory for {at} bytes");
            Error::new(ErrorKind::Io, Operation::Get, &*self.url, message).with_source(source)
        })?;
        Ok(Strip { dest: PendingBuffer::new(memory).1, contents: Contents::Copies(copies) })
    }

    /// Copies the fragments of a full strip to their memory.
    fn complete(&mut self, strip: Strip) {
        let Strip { dest, contents } = strip;
        self.completed_bytes += dest.len();
        match contents {
            Contents::Range(index) => self.arrived(index, dest.written()),
            Contents::Copies(copies) => {
                for Copied { at, index, dest: mut fragment } in copies {
                    let bytes = &dest.written()[at..at + fragment.len()];
                    fragment.fill(bytes);
                    self.arrived(index, bytes);
                }
            }
        }
    }

    /// Counts bytes of a range, and adds them to its checksum.
    fn arrived(&mut self, index: usize, bytes: &[u8]) {
        self.arrived.add(bytes.len());
        let Some(sums) = &mut self.sums else { return };
        match sums.last_mut() {
            Some((last, sum)) if *last == index => Crc32::add(bytes, [sum]),
            _ => sums.push((index, Crc32::of(bytes))),
        }
    }
}

impl Sink for ScatterList {
    fn filled(&self) -> usize {
        self.completed_bytes + self.strip.as_ref().map_or(0, |strip| strip.dest.filled())
    }

    fn remaining(&self) -> usize {
        self.length - self.filled()
    }

    fn progress(&mut self) -> ReceivedBytes {
        self.progress = ReceivedBytes::default();
        if let Some(strip) = &mut self.strip {
            strip.dest.count_in(&self.progress);
        }
        self.progress.clone()
    }

    // Bytes that were copied to their memory cannot be discarded.
    const REWINDS: bool = false;

    fn rewind(&mut self, _filled: usize) {}

    async fn receive(&mut self, result: &mut dyn GetResult) -> Result<()> {
        self.size = result.size();
        loop {
            if self.strip.is_none() {
                self.strip = self.next()?;
                self.strip.iter_mut().for_each(|strip| strip.dest.count_in(&self.progress));
            }
            let Some(strip) = &mut self.strip else { return Ok(()) };
            result.read_into(&mut strip.dest).await?;
            if strip.dest.remaining() > 0 {
                // The body ended here.
                return Ok(());
            }
            if let Some(full) = self.strip.take() {
                self.complete(full);
            }
        }
    }
}
