//! Reads one object, or a range of it, into memory. The first response has the size and version; the other parts follow
//! in parallel, and a body that breaks off is resumed at its byte. Reads one object only.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use tokio::time::Instant;

use super::response::{Expected, First};
use super::{plan, verify};
use crate::buffer::{Buffer, Dest, Memory, PendingBuffer};
use crate::client::Client;
use crate::engine::{Allocate, BatchRequest, Sink, permitted, try_run_all};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::manifest::ObjectInfo;
use crate::policy::{Stall, until_stalled};
use crate::types::{ByteRange, GetRequest, Version};

/// An object, or a range of it, to read.
#[derive(Debug, Default)]
pub struct ReadRequest {
    /// The object.
    pub key: String,
    /// The range; `None` for the whole object. A range that exceeds the object ends with it.
    pub range: Option<ByteRange>,
    /// Size of the whole object, if known from a listing.
    pub size: Option<u64>,
    /// The version to read, if known from a listing.
    pub version: Option<Version>,
}

impl ReadRequest {
    /// The whole object.
    pub fn whole(key: impl Into<String>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// The whole object of a manifest; if `pinned`, only with its size and version.
    pub fn listed(object: ObjectInfo<'_>, pinned: bool) -> Self {
        let ObjectInfo { key, size, version, .. } = object;
        match pinned {
            true => Self { key, range: None, size, version },
            false => Self::whole(key),
        }
    }
}

/// The bytes of a completed read.
#[derive(Debug)]
pub struct ReadResult {
    /// The bytes.
    pub buffer: Buffer,
    /// Size of the whole object.
    pub size: u64,
    /// The version of the object.
    pub version: Option<Version>,
}

impl Client {
    /// Reads an object or a range of it into new memory.
    ///
    /// # Errors
    /// Those of [`get_into`](Self::get_into).
    pub async fn get(self: &Arc<Self>, read: ReadRequest) -> Result<ReadResult> {
        Ok(self.get_into(read, None::<Memory>).await?.0)
    }

    /// Reads an object or a range of it into memory from `allocator`, which is called once the length is known. Also
    /// returns the allocator's handle.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, `Changed` if the requested version does not exist any more or another one appeared
    /// during the read, `Integrity` if `verify_checksums` is set and the bytes of a whole object differ, `Range` if the range
    /// starts beyond the object's end, `Config` if the caller's memory is too small, and errors that persist after the
    /// retries.
    pub async fn get_into<A: Allocate>(
        self: &Arc<Self>,
        read: ReadRequest,
        allocator: A,
    ) -> Result<(ReadResult, A::Handle)> {
        let ReadRequest { key, range, size, version } = read;
        self.store().check_key(Operation::Get, &key)?;
        let want = match &range {
            None => 0..u64::MAX,
            Some(ByteRange::Bounded(range)) => range.clone(),
            Some(ByteRange::From(start)) => *start..u64::MAX,
            // The response has the start of a suffix.
            Some(ByteRange::Suffix(_)) => 0..u64::MAX,
        };
        let ask = match range {
            Some(ByteRange::Suffix(length)) => Some(ByteRange::Suffix(length)),
            _ => plan::first(self.policy(), &want, size),
        };
        if want.is_empty() {
            let (pending, dest, _, handle) = self.pending(&key, &want, allocator)?;
            return Ok((ReadResult { buffer: pending.close(dest), size: 0, version }, handle));
        }
        let suffix = matches!(ask, Some(ByteRange::Suffix(_)));
        let bytes = plan::response_bytes(ask.as_ref(), size);
        let expected = Expected { size, version };
        let request = expected.request(&key, ask);
        let first = match self.open_first(request.clone(), bytes).await {
            // Every range of an empty object is refused. A request without a range shows whether the object is empty.
            Err(error) if error.kind() == ErrorKind::Range && (suffix || want == (0..u64::MAX)) => {
                let whole = self.open_first(GetRequest { range: None, ..request.clone() }, bytes).await?;
                let size = whole.result.size();
                match request.range {
                    Some(ByteRange::Suffix(0)) if size > 0 => return Err(error),
                    // A server that refuses all suffixes. One that refuses longer ones than the object has sent all of it.
                    Some(ByteRange::Suffix(length)) if length < size => {
                        let expected = Expected::default().after(&*whole.result);
                        drop(whole);
                        let tail = ByteRange::Bounded(size - length..size);
                        self.open_first(expected.request(&key, Some(tail)), length).await?
                    }
                    _ => whole,
                }
            }
            first => first?,
        };
        let expected = expected.after(&*first.result);
        let (size, version) = (first.result.size(), expected.version.clone());
        let answered = first.result.range();
        let want = if suffix { answered.start..size } else { want.start..want.end.min(size) };
        let checksum = match want == (0..size) && self.policy().verify_checksums {
            true => first.result.checksum(),
            false => None,
        };
        let (pending, dest, length, handle) = self.pending(&key, &want, allocator)?;
        let url = checksum.map(|_| self.store().url(&key));
        self.receive_first(key, first, want.end.min(answered.end)..want.end, expected, dest).await?;
        let buffer = pending.finish(length).map_err(|_| self.bug(&answered))?;
        if let (Some(checksum), Some(url)) = (checksum, url)
            && let Some(message) = verify::mismatch(checksum, buffer.as_slice())
        {
            return Err(Error::new(ErrorKind::Integrity, Operation::Get, url, message));
        }
        Ok((ReadResult { buffer, size, version }, handle))
    }

    pub(super) fn bug(&self, range: &Range<u64>) -> Error {
        self.store().error(ErrorKind::Io, Operation::Get, "", &format!("a writer of {range:?} outlived its read"))
    }

    /// Memory for `want`.
    pub(super) fn pending<A: Allocate>(
        &self,
        key: &str,
        want: &Range<u64>,
        allocator: A,
    ) -> Result<(PendingBuffer, Dest, usize, A::Handle)> {
        let length = usize::try_from(want.end - want.start).expect("objects of 2^64 bytes do not exist");
        let (memory, handle) = allocator.allocate(length).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidInput => {
                self.store().error(ErrorKind::Config, Operation::Get, key, &source.to_string())
            }
            _ => {
                let message = format!("no memory for {length} bytes");
                self.store().error(ErrorKind::Io, Operation::Get, key, &message).with_source(source)
            }
        })?;
        let (pending, mut dest) = PendingBuffer::new(memory);
        drop(dest.split_off(length));
        Ok((pending, dest, length, handle))
    }

    /// Receives the first response, and in parallel the parts that it does not cover, into `dest`.
    async fn receive_first(
        self: &Arc<Self>,
        key: String,
        first: First,
        rest: Range<u64>,
        expected: Expected,
        mut dest: Dest,
    ) -> Result<()> {
        let first_length = dest.len() - length_of(&rest);
        let first_range = rest.start - first_length as u64..rest.start;
        if rest.is_empty() {
            return self.receive(&key, first_range, &expected, &mut dest, Some(first)).await;
        }
        let tail = dest.split_off(first_length);
        let parts = std::iter::once((first_range, dest)).chain(self.parts(rest, tail));
        self.receive_all(key.into(), expected, parts, Some(first), usize::MAX).await?;
        Ok(())
    }

    /// `range` divided into parts, each with its part of `dest`, whose length is that of `range`.
    pub(super) fn parts(&self, range: Range<u64>, mut dest: Dest) -> impl Iterator<Item = (Range<u64>, Dest)> + use<> {
        let part_bytes = plan::part_bytes(self.policy(), range.end - range.start);
        plan::parts(range, part_bytes).map(move |range| {
            let part = dest.split_to(length_of(&range));
            (range, part)
        })
    }

    /// Receives each of `parts` into its sink, at most `max_parallel` in parallel; the first of them from `first`, if given.
    /// Returns the filled sinks in the order of the parts.
    pub(crate) async fn receive_all<S: Sink>(
        self: &Arc<Self>,
        key: Arc<str>,
        expected: Expected,
        parts: impl Iterator<Item = (Range<u64>, S)>,
        mut first: Option<First>,
        max_parallel: usize,
    ) -> Result<Vec<S>> {
        let parts = parts.map(|(range, sink)| {
            let (client, key, expected, first) = (self.clone(), key.clone(), expected.clone(), first.take());
            PartRequest { client, key, range, expected, sink, first }
        });
        let permitted = permitted([self.permits()]);
        try_run_all(parts.collect(), move || permitted().min(max_parallel)).await
    }

    /// Receives `range` into `sink`, the first attempt from `first`, if given. Resumes after failures.
    pub(crate) async fn receive<S: Sink>(
        &self,
        key: &str,
        range: Range<u64>,
        expected: &Expected,
        sink: &mut S,
        mut first: Option<First>,
    ) -> Result<()> {
        let mut attempts = self.attempts();
        // The body of an empty object is read too, to check that it is empty.
        while sink.remaining() > 0 || first.is_some() || range.is_empty() {
            let before = sink.filled();
            let error = match self.receive_once(key, &range, expected, sink, first.take()).await {
                Ok(()) if sink.remaining() == 0 => break,
                Ok(()) => {
                    let message = format!("the body ended {} bytes early", sink.remaining());
                    self.store().error(ErrorKind::ShortBody, Operation::Get, key, &message)
                }
                Err(error) => error,
            };
            attempts.progressed(sink.filled() - before);
            attempts.failed(error).await?;
        }
        attempts.succeeded();
        Ok(())
    }

    async fn receive_once<S: Sink>(
        &self,
        key: &str,
        range: &Range<u64>,
        expected: &Expected,
        sink: &mut S,
        first: Option<First>,
    ) -> Result<()> {
        let first = match first {
            Some(first) => first,
            None => self.open_once(rest(key, range, expected, sink), sink.remaining() as u64).await?,
        };
        let is_local = first.permit.is_none();
        match self.receive_body(key, range, sink, first).await {
            Err(_) if is_local => {
                let first = self.request_once(rest(key, range, expected, sink), sink.remaining() as u64).await?;
                self.receive_body(key, range, sink, first).await
            }
            received => received,
        }
    }

    /// Receives the body of a response into `sink`.
    async fn receive_body<S: Sink>(&self, key: &str, range: &Range<u64>, sink: &mut S, first: First) -> Result<()> {
        let First { mut result, requested_at, response_at, permit } = first;
        let refuse = |kind, message: &str| Err(self.store().error(kind, Operation::Get, key, message));
        if result.size() < range.end {
            let message = format!("requested bytes {range:?}, the object has {}", result.size());
            return refuse(ErrorKind::Range, &message);
        }
        if !result.has_length() && !S::REWINDS {
            return refuse(ErrorKind::Protocol, "the response has no length");
        }
        // The sink would be full before the end of the body, and only the end shows that the body is complete.
        if !result.has_length() && result.range().end > range.end {
            let message = format!("requested bytes {range:?}, the response has no Content-Range and no Content-Length");
            return refuse(ErrorKind::Protocol, &message);
        }
        let (policy, progress, before) = (self.policy(), sink.progress(), sink.filled());
        let body = sink.receive(&mut *result);
        let received = until_stalled(policy.idle_timeout, policy.min_bytes_per_s, &progress, body).await;
        let ended = Instant::now();
        let bytes = (sink.filled() - before) as u64;
        let is_local = permit.is_none();
        if let Some(mut permit) = permit {
            permit.transferred(bytes, ended);
            self.metrics().received(bytes);
        }
        let received = match received {
            Ok(received) => received,
            Err(stall) => Err(self.stalled(key, stall, sink.filled())),
        };
        match &received {
            Ok(()) if is_local => self.metrics().cached(bytes),
            Ok(()) => self.metrics().body(ended - response_at, ended - requested_at),
            // A body without a length may be an error page, or incomplete.
            Err(_) if !result.has_length() => sink.rewind(before),
            Err(_) => {}
        }
        received
    }

    fn stalled(&self, key: &str, stall: Stall, at: usize) -> Error {
        let error = self.timed_out(Operation::Get, key, &format!("{stall} at byte {at} of the body"));
        match stall {
            Stall::Silent(_) => error,
            Stall::Slow(..) => {
                let rate = self.policy().min_bytes_per_s;
                error.with_hint(format!(
                    "min_bytes_per_s={rate}: on a slow network, lower min_bytes_per_s or max_in_flight"
                ))
            }
        }
    }
}

/// The request for the bytes of `range` that `sink` lacks.
fn rest<'a, S: Sink>(key: &'a str, range: &Range<u64>, expected: &'a Expected, sink: &S) -> GetRequest<'a> {
    let ask = ByteRange::Bounded(range.start + sink.filled() as u64..range.end);
    expected.request(key, Some(ask).filter(|_| !range.is_empty()))
}

/// A range of an object, and the sink that receives it.
struct PartRequest<S> {
    client: Arc<Client>,
    key: Arc<str>,
    range: Range<u64>,
    expected: Expected,
    sink: S,
    first: Option<First>,
}

impl<S: Sink> BatchRequest for PartRequest<S> {
    type Output = S;

    async fn run(self) -> Result<S> {
        let Self { client, key, range, expected, mut sink, first } = self;
        client.receive(&key, range, &expected, &mut sink, first).await?;
        Ok(sink)
    }
}

/// Length of a range in memory.
fn length_of(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).expect("the range fits into memory")
}
