//! Walks over the headers of a shard for an index: which range to read next, and the positions of the members.

use std::collections::VecDeque;
use std::ops::Range;

use super::member::{Headers, Parsed, ParsedMember};
use super::sample::{Sample, SampleBuilder, split};
use super::{TarError, shown};

/// Size of the first range, and of those after large bodies: a header, and often the small members that follow.
const MIN_RANGE_BYTES: u64 = 32 << 10;

/// Maximum size of a range, for shards of small members.
const MAX_RANGE_BYTES: u64 = 8 << 20;

/// The part of a body beyond this size is worth a request of its own to skip it: about what a connection transfers during
/// the latency of a request.
const WORTH_SKIPPING_BYTES: u64 = 512 << 10;

/// Position of a body in its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Offset of its first byte.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Reads the headers of a shard that is not compressed.
#[derive(Debug)]
pub struct Walk {
    headers: Headers,
    builder: SampleBuilder<Position>,
    samples: VecDeque<Sample<Position>>,
    /// Size of the shard.
    size: u64,
    /// Size of the next range.
    range_bytes: u64,
    ended: bool,
    failed: Option<TarError>,
}

impl Walk {
    /// Walks over a shard of this size in bytes.
    pub fn new(size: u64) -> Self {
        Self {
            headers: Headers::new(0),
            builder: SampleBuilder::new(),
            samples: VecDeque::new(),
            size,
            range_bytes: MIN_RANGE_BYTES,
            ended: false,
            failed: None,
        }
    }

    /// The range of the shard to read next; `None` after the last member.
    ///
    /// # Errors
    /// The shard is damaged, or ends in the middle.
    pub fn next_range(&mut self) -> Result<Option<Range<u64>>, TarError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        if self.ended {
            return Ok(None);
        }
        let offset = self.headers.offset();
        if offset < self.size {
            return Ok(Some(offset..self.size.min(offset + self.range_bytes)));
        }
        let finished = self.headers.finish();
        self.end(finished)?;
        Ok(None)
    }

    /// Continues with the bytes of the range that `next_range` returned.
    ///
    /// # Errors
    /// The shard is damaged, or has a sparse member or one whose name is not UTF-8: an index could not hold it. Every later call returns this error again.
    ///
    /// # Panics
    /// These are not the bytes of that range: their number differs.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), TarError> {
        let range = self.next_range()?.unwrap_or(0..0);
        assert_eq!(bytes.len() as u64, range.end - range.start, "the bytes of {range:?}");
        let mut skippable = 0;
        while !self.ended {
            let at = self.headers.offset() - range.start;
            let Some(rest) = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).filter(|rest| !rest.is_empty())
            else {
                break;
            };
            match self.header(rest) {
                Ok(skipped) => skippable += skipped,
                Err(error) => return self.end(Err(error)),
            }
        }
        let advanced = self.headers.offset() - range.start;
        self.range_bytes =
            if skippable >= advanced / 4 * 3 { MIN_RANGE_BYTES } else { (self.range_bytes * 2).min(MAX_RANGE_BYTES) };
        Ok(())
    }

    /// Returns the samples that are complete, once.
    pub fn samples(&mut self) -> impl Iterator<Item = Sample<Position>> {
        self.samples.drain(..)
    }

    /// Parses one header. Returns how much of its body is worth skipping.
    fn header(&mut self, bytes: &[u8]) -> Result<u64, TarError> {
        let (_, parsed) = self.headers.push(bytes)?;
        match parsed {
            None => Ok(0),
            Some(Parsed::End) => self.end(Ok(())).map(|()| 0),
            Some(Parsed::Member(ParsedMember { begin, size, padded, regular })) => {
                let offset = self.headers.offset();
                let end = offset + padded;
                let name = self.headers.name();
                if end > self.size {
                    let shard = self.size;
                    let reason = format!(
                        "the shard ends in the middle: {} of {size} bytes ends at {end}, the shard at {shard}",
                        shown(name)
                    );
                    return Err(TarError::new(offset, reason));
                }
                if let Some(dot) = split(name).filter(|_| regular) {
                    if std::str::from_utf8(name).is_err() {
                        let name = shown(name);
                        let advice = "which an index cannot hold; read the shard with TarIterableDataset";
                        return Err(TarError::new(begin, format!("the name {name} is not UTF-8, {advice}")));
                    }
                    let before = self.builder.open(&name[..dot], begin);
                    keep(&mut self.samples, before)?;
                    self.builder.add(&name[dot + 1..], Position { offset, size }, end)?;
                }
                self.headers.skip(padded);
                Ok(padded.saturating_sub(WORTH_SKIPPING_BYTES))
            }
        }
    }

    /// Ends the walk.
    fn end(&mut self, result: Result<(), TarError>) -> Result<(), TarError> {
        self.ended = true;
        let result = result.and_then(|()| keep(&mut self.samples, self.builder.finish()));
        self.failed = result.clone().err();
        result
    }
}

/// Appends a sample that is complete. An index has no sample with two members of the same extension.
fn keep(samples: &mut VecDeque<Sample<Position>>, sample: Option<Sample<Position>>) -> Result<(), TarError> {
    let Some(sample) = sample else { return Ok(()) };
    match &sample.members {
        Ok(_) => samples.push_back(sample),
        Err(error) => return Err(error.clone()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, pax, samples, walked};

    #[test]
    fn a_name_that_is_not_utf8_is_an_error_of_the_walk_only() {
        let first =
            [entry(b"a.x", b'0', b"1"), entry(b"b.x", b'0', b"2"), entry(b"\xff", b'0', b"no extension")].concat();
        for second in [
            entry(b"c\xff.x", b'0', b"3"),
            entry(b"c.\xff", b'0', b"3"),
            [pax(&[("path", b"\xc3/c.x")]), entry(b"c.x", b'0', b"3")].concat(),
        ] {
            let shard = [first.clone(), second].concat();
            let (read, result) = samples(&shard, &[], None, 0);
            assert_eq!((read.len(), result), (3, Ok(())));
            let (found, result, _) = walked(&shard);
            let error = result.unwrap_err();
            assert_eq!((found.as_slice(), error.offset), (&read[..1], 3072));
            assert!(error.reason.starts_with("the name \""), "{error}");
            let advice = "is not UTF-8, which an index cannot hold; read the shard with TarIterableDataset";
            assert!(error.reason.ends_with(advice), "{error}");
        }
    }
}
