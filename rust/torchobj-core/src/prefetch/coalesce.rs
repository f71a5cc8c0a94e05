//! Reads neighbouring ranges of an object with one request, each into a segment of its own. `window` chooses entries that
//! follow each other in the announced order, `read::Group` the gaps that are read.

use std::ops::Range;
use std::sync::Arc;

use super::job::{Job, Reading};
use super::{Body, KnownSource, Object, Prefetcher, unknown_object};
use crate::error::{Error, ErrorKind, Result};
use crate::fork;
use crate::object_ref::ObjectRef;
use crate::read::Group;

/// Maximum size of a read of several ranges: about what a connection receives in 20 ms, the time to a first byte. Larger
/// ones save little, and their first range arrives later.
const MAX_BYTES: u64 = 1 << 20;

/// Ranges that are read with one request.
struct Span {
    first: ObjectRef,
    group: Group,
    start: u64,
    max_bytes: u64,
}

impl Span {
    /// A span of one range; `None` if `first` is not a range whose length is known.
    fn new(first: ObjectRef, max_bytes: u64) -> Option<Self> {
        let range = range_of(&first)?;
        Some(Self { start: range.start, group: Group::new(&range), first, max_bytes })
    }

    /// Adds a range. Returns false if it is of another object or version, too far away, or if the span becomes too large.
    fn join(&mut self, next: &ObjectRef) -> bool {
        let Self { first, group, start, max_bytes } = self;
        let is_same = next.url() == first.url() && next.version() == first.version() && next.size() == first.size();
        let Some(range) = range_of(next).filter(|_| is_same) else { return false };
        range.end <= start.saturating_add(*max_bytes) && group.join(&range)
    }
}

/// The range of a reference, if it has an end, is not empty, and is within the object as far as its size is known.
fn range_of(name: &ObjectRef) -> Option<Range<u64>> {
    let range = name.start()..name.end()?;
    (!range.is_empty() && name.size().is_none_or(|size| range.end <= size)).then_some(range)
}

impl Prefetcher {
    /// Adds the entries to `job` that are read with the same request.
    pub(super) fn extend(&self, mut job: Job) -> Job {
        let _inside = fork::enter();
        let Object { source, index } = job.first.object;
        let sources = self.sources();
        let Some(KnownSource::Named(names)) = sources.get(&source) else { return job };
        let Some(first) = names.get(index) else { return job };
        let max_bytes = names.part_bytes(&first).map_or(MAX_BYTES, |part_bytes| part_bytes.min(MAX_BYTES));
        let Some(mut span) = Span::new(first, max_bytes) else { return job };
        let joins =
            |object: Object| object.source == source && names.get(object.index).is_some_and(|name| span.join(&name));
        self.window().extend(&mut job, joins, |charge, reserved| self.arena.fits(charge, reserved));
        job
    }

    /// Reads ranges of one object with one request. `None` for an entry that must be read alone: the request failed for
    /// a reason that may not concern all of them.
    pub(super) async fn read_together(self: &Arc<Self>, readings: Vec<Reading>) -> Vec<Option<Result<Body>>> {
        let count = readings.len();
        match self.try_read_together(readings).await {
            Ok(bodies) => bodies.into_iter().map(|body| Some(Ok(body))).collect(),
            Err(error) if matches!(error.kind(), ErrorKind::Range | ErrorKind::Protocol | ErrorKind::Io) => {
                (0..count).map(|_| None).collect()
            }
            Err(error) => {
                let bytes = error.to_bytes();
                (0..count).map(|_| Some(Err(Error::from_bytes(&bytes)))).collect()
            }
        }
    }

    async fn try_read_together(self: &Arc<Self>, readings: Vec<Reading>) -> Result<Vec<Body>> {
        let first = readings.first().expect("a read has an entry");
        let (first, loader) = (first.object, first.loader);
        let (client, read, more) = self.request(first, loader)?;
        if more {
            self.pump();
        }
        let ranges = {
            let _inside = fork::enter();
            let sources = self.sources();
            let range = |reading: Reading| {
                let Some(KnownSource::Named(names)) = sources.get(&reading.object.source) else { return None };
                let range = range_of(&names.get(reading.object.index)?)?;
                Some((range, self.allocator(reading)))
            };
            readings.into_iter().map(range).collect::<Option<Vec<_>>>()
        };
        let read = client.get_ranges(read, ranges.ok_or_else(|| unknown_object(first))?).await?;
        Ok(read.into_iter().map(|(result, segment)| Body { result, segment }).collect())
    }
}
