//! Reads one object, or a range of one, into memory: the first answer tells size and version, the rest follows as
//! parts in parallel, and a body that breaks goes on at its byte. Knows nothing of other objects.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::plan;
use super::response::{Expected, First};
use crate::buffer::{Buffer, Dest, Landing, Memory, Progress};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::Opened;
use crate::transfer::{Stall, moving};
use crate::types::{ByteRange, GetRequest, Version};

/// Where the bytes are to land.
#[derive(Default)]
pub enum Target {
    /// Memory of ours.
    #[default]
    Ours,
    /// Memory of the caller's, that is large enough.
    Given(Memory),
    /// Memory that is made once it is known how many bytes there are.
    Made(Box<dyn FnOnce(usize) -> io::Result<Memory> + Send>),
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "Ours",
            Self::Given(_) => "Given",
            Self::Made(_) => "Made",
        })
    }
}

/// What is to be read.
#[derive(Debug, Default)]
pub struct Read {
    /// The object.
    pub key: String,
    /// Which bytes; `None` for all. An end behind the object's is cut.
    pub range: Option<ByteRange>,
    /// Size of the whole object, where a listing told it.
    pub size: Option<u64>,
    /// The version that must answer, where a listing told it.
    pub version: Option<Version>,
    /// Where to.
    pub into: Target,
}

impl Read {
    /// All of one object.
    pub fn whole(key: impl Into<String>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }
}

/// What was read.
#[derive(Debug)]
pub struct Landed {
    /// The bytes.
    pub buffer: Buffer,
    /// Size of the whole object.
    pub size: u64,
    /// The version they are of.
    pub version: Option<Version>,
}

/// Takes the bytes of one range, in order. What it took stays when a body breaks: the next one goes on there.
pub(super) trait Sink: Send {
    /// How many bytes it took.
    fn filled(&self) -> usize;

    /// How many are still to come.
    fn remaining(&self) -> usize;

    /// Counts the bytes that it takes from now on.
    fn progress(&mut self) -> Progress;

    /// Whether it can drop what it took.
    const REWINDS: bool;

    /// Drops what it took behind the first `filled` bytes.
    fn rewind(&mut self, filled: usize);

    /// Takes the body of an answer, until that ends or nothing is missing.
    fn take(&mut self, opened: &mut dyn Opened) -> impl Future<Output = Result<()>> + Send;
}

impl Sink for Dest {
    fn filled(&self) -> usize {
        self.filled()
    }

    fn remaining(&self) -> usize {
        self.remaining()
    }

    fn progress(&mut self) -> Progress {
        let progress = Progress::default();
        self.count_in(&progress);
        progress
    }

    const REWINDS: bool = true;

    fn rewind(&mut self, filled: usize) {
        self.rewind(filled);
    }

    async fn take(&mut self, opened: &mut dyn Opened) -> Result<()> {
        opened.read_into(self).await
    }
}

impl Client {
    /// Reads an object or a range of it.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, `Changed` when the version that was asked for is gone or another appeared half-way,
    /// `Range` when the range begins behind the object's end, `Config` when `into` is too small, and what persists
    /// after the retries.
    pub async fn get(self: &Arc<Self>, read: Read) -> Result<Landed> {
        let Read { key, range, size, version, into } = read;
        self.store().check_key(Operation::Get, &key)?;
        let want = match &range {
            None => 0..u64::MAX,
            Some(ByteRange::Bounded(range)) => range.clone(),
            Some(ByteRange::From(start)) => *start..u64::MAX,
            // Where a suffix begins is known from its answer.
            Some(ByteRange::Suffix(_)) => 0..u64::MAX,
        };
        let ask = match range {
            Some(ByteRange::Suffix(length)) => Some(ByteRange::Suffix(length)),
            _ => plan::first(self.policy(), &want, size),
        };
        if want.is_empty() {
            return self.empty(&key, into, version);
        }
        let suffix = matches!(ask, Some(ByteRange::Suffix(_)));
        let bytes = plan::asked_bytes(ask.as_ref(), size);
        let request = GetRequest { key: &key, range: ask, size, version: version.as_ref() };
        let first = match self.open_first(request.clone(), bytes).await {
            // Every range of an empty object is refused. A request without a range shows whether the object is empty.
            Err(error) if error.kind() == ErrorKind::Range && (suffix || want == (0..u64::MAX)) => {
                let whole = self.open_first(GetRequest { range: None, ..request }, bytes).await?;
                if suffix && whole.opened.size() > 0 {
                    return Err(error);
                }
                whole
            }
            first => first?,
        };
        let size = first.opened.size();
        let version = first.opened.version().cloned().or(version);
        let answered = first.opened.range();
        let want = if suffix { answered.start..size } else { want.start..want.end.min(size) };
        let expected = Expected { size: Some(size), version: version.clone() };
        let (landing, dest, length) = self.landing(&key, &want, into)?;
        self.land(key, first, want.end.min(answered.end)..want.end, expected, dest).await?;
        let buffer = landing.finish(length).map_err(|_| self.bug(&answered))?;
        Ok(Landed { buffer, size, version })
    }

    fn bug(&self, range: &Range<u64>) -> Error {
        self.store().error(ErrorKind::Io, Operation::Get, "", &format!("a writer of {range:?} outlived its read"))
    }

    fn empty(&self, key: &str, into: Target, version: Option<Version>) -> Result<Landed> {
        let (landing, dest, _) = self.landing(key, &(0..0), into)?;
        drop(dest);
        let buffer = landing.finish(0).map_err(|_| self.bug(&(0..0)))?;
        Ok(Landed { buffer, size: 0, version })
    }

    /// Memory for `want`: the caller's if it is large enough, or new.
    fn landing(&self, key: &str, want: &Range<u64>, into: Target) -> Result<(Landing, Dest, usize)> {
        let length = usize::try_from(want.end - want.start).expect("objects of 2^64 bytes do not exist");
        let made = match into {
            Target::Given(memory) if memory.len() < length => {
                let message = format!("the buffer of {} bytes is too small for {length}", memory.len());
                return Err(self.store().error(ErrorKind::Config, Operation::Get, key, &message));
            }
            Target::Given(memory) => Ok(memory),
            Target::Ours => Memory::allocate(length),
            Target::Made(make) => make(length),
        };
        let memory = made.map_err(|source| {
            let message = format!("no memory for {length} bytes");
            self.store().error(ErrorKind::Io, Operation::Get, key, &message).with_source(source)
        })?;
        let (landing, mut dest) = Landing::new(memory);
        drop(dest.split_off(length));
        Ok((landing, dest, length))
    }

    /// Receives the first response, and what it does not cover in parts beside it, into `dest`.
    async fn land(
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
        self.receive_all(key.into(), expected, parts, Some(first)).await?;
        Ok(())
    }

    /// Receives `range` into `dest`, which has room for exactly that, as parts in parallel.
    pub(super) async fn receive_parts(
        self: &Arc<Self>,
        key: Arc<str>,
        range: Range<u64>,
        expected: Expected,
        dest: Dest,
    ) -> Result<()> {
        self.receive_all(key, expected, self.parts(range, dest), None).await?;
        Ok(())
    }

    /// `range` in parts, each with its share of `dest`.
    fn parts(&self, range: Range<u64>, mut dest: Dest) -> impl Iterator<Item = (Range<u64>, Dest)> + use<> {
        let part_bytes = plan::part_bytes(self.policy(), range.end - range.start);
        plan::parts(range, part_bytes).map(move |range| {
            let part = dest.split_to(length_of(&range));
            (range, part)
        })
    }

    /// Receives each of `parts` into its sink, all in parallel, the first of them from `first` if its answer is there
    /// already. Returns the sinks, full, in the order of the parts.
    pub(super) async fn receive_all<S: Sink + 'static>(
        self: &Arc<Self>,
        key: Arc<str>,
        expected: Expected,
        parts: impl Iterator<Item = (Range<u64>, S)>,
        mut first: Option<First>,
    ) -> Result<Vec<S>> {
        let mut tasks = JoinSet::new();
        for (index, (range, mut sink)) in parts.enumerate() {
            let (client, key, expected, first) = (self.clone(), key.clone(), expected.clone(), first.take());
            tasks.spawn(async move {
                client.receive(&key, range, &expected, &mut sink, first).await?;
                Ok::<_, Error>((index, sink))
            });
        }
        let mut full = Vec::with_capacity(tasks.len());
        while let Some(part) = tasks.join_next().await {
            full.push(part.map_err(|panic| {
                self.store().error(ErrorKind::Cancelled, Operation::Get, &key, "a part was lost").with_source(panic)
            })??);
        }
        full.sort_unstable_by_key(|(index, _)| *index);
        Ok(full.into_iter().map(|(_, sink)| sink).collect())
    }

    /// Receives `range` into `sink`, resuming after failures, from `first` if the response is there already.
    pub(super) async fn receive<S: Sink>(
        &self,
        key: &str,
        range: Range<u64>,
        expected: &Expected,
        sink: &mut S,
        mut first: Option<First>,
    ) -> Result<()> {
        let mut attempts = self.attempts();
        // An empty object is read too: its body must end where it begins.
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
        let First { mut opened, answered, mut permit } = match first {
            Some(first) => first,
            None => {
                let ask = ByteRange::Bounded(range.start + sink.filled() as u64..range.end);
                let ask = Some(ask).filter(|_| !range.is_empty());
                self.open_once(expected.request(key, ask), sink.remaining() as u64).await?
            }
        };
        let refuse = |kind, message: &str| Err(self.store().error(kind, Operation::Get, key, message));
        if opened.size() < range.end {
            let message = format!("asked for bytes {range:?}, the object has {}", opened.size());
            return refuse(ErrorKind::Range, &message);
        }
        if !opened.announced() && !S::REWINDS {
            return refuse(ErrorKind::Protocol, "the response does not say how long it is");
        }
        // The sink is full before the end of the body, which alone shows that the body is of the object.
        if !opened.announced() && opened.range().end > range.end {
            let message = format!("asked for bytes {range:?}, the response has no Content-Range and no Content-Length");
            return refuse(ErrorKind::Protocol, &message);
        }
        let (policy, progress, before) = (self.policy(), sink.progress(), sink.filled());
        let body = sink.take(&mut *opened);
        let result = moving(policy.idle_timeout, policy.min_bytes_per_s, &progress, body).await;
        let ended = Instant::now();
        permit.moved((sink.filled() - before) as u64, ended);
        let result = match result {
            Ok(result) => result,
            Err(stall) => Err(self.stalled(key, stall, sink.filled())),
        };
        match &result {
            Ok(()) => self.metrics().body.add(ended - answered),
            // It may be of anything: an error page, or half of the object.
            Err(_) if !opened.announced() => sink.rewind(before),
            Err(_) => {}
        }
        result
    }

    fn stalled(&self, key: &str, stall: Stall, at: usize) -> Error {
        let error = self.silence(Operation::Get, key, &format!("{stall} at byte {at} of the body"));
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

/// Length of a range that lies in memory.
fn length_of(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).expect("it lies in memory")
}
