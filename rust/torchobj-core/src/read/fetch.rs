//! Reads one object, or a range of one, into memory: the first answer tells size and version, the rest follows as
//! parts in parallel, and a body that breaks goes on at its byte. Knows nothing of other objects.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::plan;
use crate::buffer::{Buffer, Dest, Landing, Memory};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::Opened;
use crate::transfer::{Permit, idle};
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
        let first = match self.open_first(&key, ask, size, version.as_ref()).await {
            // Every range of an empty object is refused; so is this the way to see that it is empty.
            Err(error) if error.kind() == ErrorKind::Range && (suffix || want == (0..u64::MAX)) => {
                return self.empty(&key, into, version);
            }
            first => first?,
        };
        let size = first.opened.size();
        let version = first.opened.version().cloned().or(version);
        let answered = first.opened.range();
        let want = if suffix { answered.start..size } else { want.start..want.end.min(size) };
        let (landing, dest, length) = self.landing(&key, &want, into)?;
        self.land(key, first, want.end.min(answered.end)..want.end, version.clone(), dest).await?;
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

    pub(super) async fn open_first(
        &self,
        key: &str,
        range: Option<ByteRange>,
        size: Option<u64>,
        version: Option<&Version>,
    ) -> Result<First> {
        let bytes = plan::asked_bytes(range.as_ref(), size);
        let mut attempts = self.attempts();
        loop {
            let permit = self.permit().await;
            let opened = match self.open(GetRequest { key, range: range.clone(), version }, bytes).await {
                Ok((opened, answered)) => {
                    self.check(key, range.as_ref(), version, opened).map(|opened| (opened, answered))
                }
                Err(error) => Err(error),
            };
            match opened {
                Ok((opened, answered)) => {
                    attempts.succeeded();
                    return Ok(First { opened, answered, permit });
                }
                Err(error) => {
                    drop(permit);
                    attempts.failed(error).await?;
                }
            }
        }
    }

    /// Whether an answer is to what was asked. A store that ignores ranges may answer with the whole object, if that
    /// begins where the range does.
    fn check(
        &self,
        key: &str,
        range: Option<&ByteRange>,
        version: Option<&Version>,
        opened: Box<dyn Opened>,
    ) -> Result<Box<dyn Opened>> {
        let (size, answered) = (opened.size(), opened.range());
        let expected = match range {
            None => 0..size,
            Some(ByteRange::Bounded(range)) => range.start..range.end.min(size),
            Some(ByteRange::From(start)) => *start..size,
            Some(ByteRange::Suffix(length)) => size.saturating_sub(*length)..size,
        };
        if answered != expected && !(answered == (0..size) && expected.start == 0) {
            let message = format!("asked for bytes {expected:?} of {size}, the answer has {answered:?}");
            return Err(self.store().error(ErrorKind::Protocol, Operation::Get, key, &message));
        }
        match (version, opened.version()) {
            (Some(asked), Some(got)) if asked != got => {
                let message = format!("the object changed: it was {asked:?}, now it is {got:?}");
                Err(self.store().error(ErrorKind::Changed, Operation::Get, key, &message))
            }
            (Some(_), None) => {
                let message = "the answer does not say which version it is of";
                Err(self.store().error(ErrorKind::Protocol, Operation::Get, key, message))
            }
            _ => Ok(opened),
        }
    }

    /// Receives the first answer and, beside it, `rest` in parts, into `dest`.
    async fn land(
        self: &Arc<Self>,
        key: String,
        first: First,
        rest: Range<u64>,
        version: Option<Version>,
        mut dest: Dest,
    ) -> Result<()> {
        let first_length = dest.len() - usize::try_from(rest.end - rest.start).expect("a part of dest");
        let first_range = rest.start - first_length as u64..rest.start;
        if rest.is_empty() {
            return self.receive(&key, first_range, version.as_ref(), &mut dest, Some(first)).await;
        }
        let key: Arc<str> = key.into();
        let tail = dest.split_off(first_length);
        let rest = self.receive_parts(key.clone(), rest, version.clone(), tail);
        let first = async {
            let mut dest = dest;
            self.receive(&key, first_range, version.as_ref(), &mut dest, Some(first)).await
        };
        tokio::try_join!(first, rest)?;
        Ok(())
    }

    /// Receives `range` into `dest`, which has room for exactly that, as parts in parallel.
    pub(super) async fn receive_parts(
        self: &Arc<Self>,
        key: Arc<str>,
        range: Range<u64>,
        version: Option<Version>,
        mut dest: Dest,
    ) -> Result<()> {
        let part_bytes = plan::part_bytes(self.policy(), range.end - range.start);
        let parts = plan::parts(range, part_bytes).map(|range| {
            let length = usize::try_from(range.end - range.start).expect("a part of dest");
            (range, dest.split_to(length))
        });
        self.receive_all(key, version, parts, None).await?;
        Ok(())
    }

    /// Receives each of `parts` into its sink, all in parallel, the first of them from `first` if its answer is there
    /// already. Returns the sinks, full, in the order of the parts.
    pub(super) async fn receive_all<S: Sink + 'static>(
        self: &Arc<Self>,
        key: Arc<str>,
        version: Option<Version>,
        parts: impl Iterator<Item = (Range<u64>, S)>,
        mut first: Option<First>,
    ) -> Result<Vec<S>> {
        let mut tasks = JoinSet::new();
        for (index, (range, mut sink)) in parts.enumerate() {
            let (client, key, version, first) = (self.clone(), key.clone(), version.clone(), first.take());
            tasks.spawn(async move {
                client.receive(&key, range, version.as_ref(), &mut sink, first).await?;
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

    /// Receives `range` into `sink`, going on after what breaks, from `first` if the answer is there already.
    pub(super) async fn receive(
        &self,
        key: &str,
        range: Range<u64>,
        version: Option<&Version>,
        sink: &mut impl Sink,
        mut first: Option<First>,
    ) -> Result<()> {
        let mut attempts = self.attempts();
        while sink.remaining() > 0 || first.is_some() {
            let before = sink.filled();
            match self.receive_once(key, &range, version, sink, first.take()).await {
                Ok(()) if sink.remaining() == 0 => break,
                Ok(()) => {
                    attempts.progressed(sink.filled() - before);
                    let message = format!("the body ended {} bytes early", sink.remaining());
                    let error = self.store().error(ErrorKind::ShortBody, Operation::Get, key, &message);
                    attempts.failed(error).await?;
                }
                Err(error) => {
                    attempts.progressed(sink.filled() - before);
                    attempts.failed(error).await?;
                }
            }
        }
        attempts.succeeded();
        Ok(())
    }

    async fn receive_once(
        &self,
        key: &str,
        range: &Range<u64>,
        version: Option<&Version>,
        sink: &mut impl Sink,
        first: Option<First>,
    ) -> Result<()> {
        let First { mut opened, answered, mut permit } = match first {
            Some(first) => first,
            None => {
                let permit = self.permit().await;
                let ask = Some(ByteRange::Bounded(range.start + sink.filled() as u64..range.end));
                let request = GetRequest { key, range: ask.clone(), version };
                let (opened, answered) = self.open(request, sink.remaining() as u64).await?;
                let opened = self.check(key, ask.as_ref(), version, opened)?;
                First { opened, answered, permit }
            }
        };
        if opened.size() < range.end {
            let message = format!("asked for bytes {range:?}, the object has {}", opened.size());
            return Err(self.store().error(ErrorKind::Range, Operation::Get, key, &message));
        }
        let (limit, before) = (self.policy().idle_timeout, sink.filled());
        let result = idle(limit, sink.take(&mut *opened)).await;
        let ended = Instant::now();
        permit.moved((sink.filled() - before) as u64, ended);
        match result {
            Some(result) => {
                if result.is_ok() {
                    self.metrics().body.add(ended - answered);
                }
                result
            }
            None => {
                let message = format!("the body stood still for {} s at byte {}", limit.as_secs_f64(), sink.filled());
                Err(self.silence(Operation::Get, key, &message))
            }
        }
    }
}

/// An answer whose body waits, and the permit that it holds meanwhile.
pub(super) struct First {
    pub(super) opened: Box<dyn Opened>,
    answered: Instant,
    permit: Permit,
}
