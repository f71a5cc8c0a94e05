//! Reads samples from the bytes of a shard as they arrive.

use std::collections::VecDeque;

use super::decompress::{Compression, Decompressor};
use super::member::{Headers, Parsed, ParsedMember};
use super::sample::{Sample, SampleBuilder, split};
use super::{TarError, shown};
use crate::buffer::{Buffer, Dest, Memory, PendingBuffer, SharedBuffer};

/// Memory for a body that has not arrived completely: at first at most this size, then twice what has arrived. A damaged
/// size therefore allocates little.
const FIRST_BYTES: usize = 64 << 20;

/// Number of bytes that a `push` decompresses before it returns.
const OUTPUT_BYTES: usize = 64 << 20;

/// Maximum size of a sample of a compressed shard: this number of bytes, or this multiple of its compressed bytes if that is
/// more. Texts compress to a tenth or less, and zeros to a thousandth: a small damaged or malicious shard must not fill the
/// memory.
const MAX_SAMPLE_BYTES: u64 = 256 << 20;
const MAX_SAMPLE_RATIO: u64 = 100;

/// Reads a shard.
#[derive(Debug)]
pub struct Reader {
    archive: Archive,
    decompressor: Option<Decompressor>,
    /// Compressed bytes that were not decompressed yet.
    compressed: VecDeque<(SharedBuffer, usize)>,
    /// Number of bytes after decompression so far.
    output: u64,
    /// Offset of the sample that is being read, and the number of compressed bytes before the block that it begins in.
    sample: (u64, u64),
    failed: Option<TarError>,
}

impl Reader {
    /// Reads a shard from its start, or one that is not compressed from the offset of a header.
    pub fn new(compression: Option<Compression>, position: u64) -> Self {
        let decompressor = compression.map(Decompressor::new);
        let archive = Archive::new(position);
        Self { archive, decompressor, compressed: VecDeque::new(), output: 0, sample: (0, 0), failed: None }
    }

    /// Whether another `push`, of no bytes, would return more samples: the rest of what was pushed is still compressed.
    pub fn is_pending(&self) -> bool {
        self.failed.is_none() && !self.compressed.is_empty()
    }

    /// Continues with these bytes. Appends the samples that became complete to `samples`, also if it fails.
    ///
    /// # Errors
    /// The shard is damaged, or has a sparse member. Every later call returns this error again.
    pub fn push(&mut self, bytes: &SharedBuffer, samples: &mut Vec<Sample<Buffer>>) -> Result<(), TarError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let pushed = match &mut self.decompressor {
            None => self.archive.push(bytes, samples),
            Some(_) => {
                if !bytes.as_slice().is_empty() {
                    self.compressed.push_back((bytes.clone(), 0));
                }
                self.decompress(samples, OUTPUT_BYTES)
            }
        };
        self.remember(pushed)
    }

    /// Ends the shard. Appends the remaining samples to `samples`.
    ///
    /// # Errors
    /// The shard ends in the middle, or is damaged.
    pub fn finish(&mut self, samples: &mut Vec<Sample<Buffer>>) -> Result<(), TarError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let mut finished = self.decompress(samples, usize::MAX);
        if let (Ok(()), Some(decompressor)) = (&finished, &self.decompressor) {
            finished = decompressor.finish();
        }
        let finished = finished.and_then(|()| self.archive.finish(samples));
        self.remember(finished)
    }

    fn remember(&mut self, result: Result<(), TarError>) -> Result<(), TarError> {
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.compressed.clear();
            self.archive.builder.finish();
            self.archive.state = ReaderState::Ended;
        }
        result
    }

    /// Checks the size of the sample that is being read, given the compressed bytes read before the last block and after it.
    fn check_ratio(&mut self, before: u64, after: u64) -> Result<(), TarError> {
        let Some((begin, key)) = self.archive.builder.current() else { return Ok(()) };
        if self.sample.0 != begin {
            self.sample = (begin, before);
        }
        let (bytes, compressed) = (self.output - begin, after - self.sample.1);
        if bytes <= compressed.saturating_mul(MAX_SAMPLE_RATIO).max(MAX_SAMPLE_BYTES) {
            return Ok(());
        }
        let reason = format!(
            "sample {} has more than {bytes} bytes, decompressed from {compressed}; the limit is {MAX_SAMPLE_BYTES}, or \
             {MAX_SAMPLE_RATIO} times the compressed bytes; store such samples in a shard that is not compressed",
            shown(key)
        );
        Err(TarError::new(begin, reason))
    }

    /// Decompresses up to about `limit` bytes.
    fn decompress(&mut self, samples: &mut Vec<Sample<Buffer>>, limit: usize) -> Result<(), TarError> {
        let mut output = 0;
        while let (Some(decompressor), Some((bytes, done))) = (&mut self.decompressor, self.compressed.front_mut()) {
            if output >= limit {
                break;
            }
            let before = decompressor.read();
            let (read, block) = decompressor.push(&bytes.as_slice()[*done..])?;
            *done += read;
            if let Some(block) = block {
                output = output.saturating_add(block.len());
                self.output += block.len() as u64;
                self.archive.push(&block.into(), samples)?;
                let after = decompressor.read();
                self.check_ratio(before, after)?;
            } else if *done == bytes.as_slice().len() {
                self.compressed.pop_front();
            }
        }
        Ok(())
    }
}

/// Where in the archive the next byte is.
#[derive(Debug)]
enum ReaderState {
    Header,
    /// In the body of a member of a sample.
    MemberBody(MemberBody),
    /// In padding, or in a body that is skipped: the number of bytes left.
    Skip(u64),
    /// After the last member. The remaining bytes are ignored.
    Ended,
}

/// The archive, after decompression.
#[derive(Debug)]
struct Archive {
    headers: Headers,
    builder: SampleBuilder<Buffer>,
    state: ReaderState,
}

impl Archive {
    fn new(position: u64) -> Self {
        Self { headers: Headers::new(position), builder: SampleBuilder::new(), state: ReaderState::Header }
    }

    fn push(&mut self, shared: &SharedBuffer, samples: &mut Vec<Sample<Buffer>>) -> Result<(), TarError> {
        let bytes = shared.as_slice();
        let mut at = 0;
        while at < bytes.len() {
            match &mut self.state {
                ReaderState::Ended => break,
                ReaderState::Skip(left) => {
                    let count = (*left).min((bytes.len() - at) as u64);
                    *left -= count;
                    at += usize::try_from(count).expect("at most the length of a slice");
                    if *left == 0 {
                        self.state = ReaderState::Header;
                    }
                }
                ReaderState::MemberBody(body) => {
                    at += body.fill(&bytes[at..])?;
                    if body.left == 0 {
                        let ReaderState::MemberBody(body) = std::mem::replace(&mut self.state, ReaderState::Header)
                        else {
                            unreachable!("matched above")
                        };
                        self.close(body)?;
                    }
                }
                ReaderState::Header => {
                    let (count, parsed) = self.headers.push(&bytes[at..])?;
                    at += count;
                    match parsed {
                        None => {}
                        Some(Parsed::End) => {
                            samples.extend(self.builder.finish());
                            self.state = ReaderState::Ended;
                        }
                        Some(Parsed::Member(member)) => at = self.member(shared, at, member, samples)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins a member whose body begins at `at` of the pushed bytes. Returns the position after what was used.
    fn member(
        &mut self,
        shared: &SharedBuffer,
        at: usize,
        member: ParsedMember,
        samples: &mut Vec<Sample<Buffer>>,
    ) -> Result<usize, TarError> {
        let ParsedMember { begin, size, padded, regular } = member;
        let data = self.headers.offset();
        let end = data + padded;
        self.headers.skip(padded);
        let name = self.headers.name();
        let Some(dot) = split(name).filter(|_| regular) else {
            if padded > 0 {
                self.state = ReaderState::Skip(padded);
            }
            return Ok(at);
        };
        samples.extend(self.builder.open(&name[..dot], begin));
        let available = (shared.as_slice().len() - at) as u64;
        if size > available {
            let body = MemberBody { extension: name[dot + 1..].to_vec(), data, size, left: size, end, partial: None };
            self.state = ReaderState::MemberBody(body);
            return Ok(at);
        }
        let size = usize::try_from(size).expect("at most the length of a slice");
        self.builder.add(&name[dot + 1..], shared.view(at..at + size), end)?;
        let padding = padded - size as u64;
        if padding > 0 {
            self.state = ReaderState::Skip(padding);
        }
        Ok(at + size)
    }

    /// Adds a body that has arrived.
    fn close(&mut self, body: MemberBody) -> Result<(), TarError> {
        let padding = body.end - body.data - body.size;
        if padding > 0 {
            self.state = ReaderState::Skip(padding);
        }
        let MemberBody { extension, partial, end, .. } = body;
        let (pending, dest) = partial.expect("a body of at least 1 byte was filled");
        self.builder.add(&extension, pending.close(dest), end)
    }

    fn finish(&mut self, samples: &mut Vec<Sample<Buffer>>) -> Result<(), TarError> {
        let offset = self.headers.offset();
        match &self.state {
            ReaderState::Ended => return Ok(()),
            ReaderState::Header => self.headers.finish()?,
            ReaderState::MemberBody(MemberBody { data, size, left, .. }) => {
                let name = shown(self.headers.name());
                let reason = format!("the shard ends in the middle: after {} of {size} bytes of {name}", size - left);
                return Err(TarError::new(*data, reason));
            }
            ReaderState::Skip(left) => {
                let name = shown(self.headers.name());
                let reason = format!("the shard ends in the middle: {left} bytes of {name} or its padding are missing");
                return Err(TarError::new(offset - left, reason));
            }
        }
        samples.extend(self.builder.finish());
        self.state = ReaderState::Ended;
        Ok(())
    }
}

/// A body that spans several pieces.
#[derive(Debug)]
struct MemberBody {
    extension: Vec<u8>,
    /// Offset of its first byte.
    data: u64,
    size: u64,
    /// Number of bytes that have not arrived.
    left: u64,
    /// Offset after its padding.
    end: u64,
    /// The bytes that have arrived.
    partial: Option<(PendingBuffer, Dest)>,
}

impl MemberBody {
    /// Copies as many of `bytes` as belong to the body. Returns their number.
    fn fill(&mut self, bytes: &[u8]) -> Result<usize, TarError> {
        let count = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let filled = self.partial.as_ref().map_or(0, |(_, dest)| dest.filled());
        if self.partial.as_ref().is_none_or(|(_, dest)| dest.remaining() < count) {
            self.grow(filled, count)?;
        }
        let (_, dest) = self.partial.as_mut().expect("`grow` sets it");
        dest.fill(&bytes[..count]);
        self.left -= count as u64;
        Ok(count)
    }

    /// Makes space for `count` more bytes.
    fn grow(&mut self, filled: usize, count: usize) -> Result<(), TarError> {
        let capacity = filled.saturating_add(count).saturating_mul(2).max(FIRST_BYTES);
        let capacity = usize::try_from(self.size).unwrap_or(usize::MAX).min(capacity);
        let memory = Memory::allocate(capacity).map_err(|error| {
            let reason = format!("no memory for a member of {} bytes after {filled} of them: {error}", self.size);
            TarError::new(self.data, reason)
        })?;
        let (pending, mut dest) = PendingBuffer::new(memory);
        if let Some((_, before)) = &self.partial {
            dest.fill(before.written());
        }
        self.partial = Some((pending, dest));
        Ok(())
    }
}
