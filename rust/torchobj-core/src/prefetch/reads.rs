//! Runs the reads that `window` selects, as a source of the engine. Reads neighbouring ranges of an object with one request,
//! each into a segment of its own. `window` determines the order; `read::RangeGroup` decides which gaps are read.

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;

use super::decision::{CoalescedRead, Decision, EntryRead, ObjectId, Reservation};
use super::names::range_of;
use super::prefetcher::{FilledSegment, Prefetcher, Waiter};
use super::shortage::Holders;
use super::sources::{RegisteredSource, named_range, unknown_object};
use super::stats::AllCounters;
use crate::arena::{Arena, Segment, Usage};
use crate::buffer::{Memory, PendingBuffer};
use crate::client::Client;
use crate::engine::{Allocate, Halt, RequestSource, Tasks, pump};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::read::{RangeGroup, ReadRequest, ReadResult};
use crate::types::ByteRange;

/// Maximum size of a read of several ranges: about what a connection receives in 20 ms, the time to a first byte. Larger
/// ones save little, and their first range arrives later.
const MAX_BYTES: u64 = 1 << 20;

impl RequestSource for Prefetcher {
    type Item = CoalescedRead;
    /// The loader that the object was read for.
    type Done = u64;

    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn limit(&self) -> usize {
        let _inside = fork::enter();
        self.sources.limit()
    }

    fn next(&self) -> Result<CoalescedRead, Halt> {
        loop {
            let (next, warning) = {
                let _inside = fork::enter();
                let mut window = self.window();
                let next = window.next(|charge, reserved| self.arena.fits(charge, reserved));
                // Under the lock of the window: the last decision sets the flag.
                match next {
                    Decision::OutOfMemory if self.arena.set_memory_needed() => continue,
                    Decision::OutOfMemory => {}
                    Decision::Read(_) | Decision::Evict(..) | Decision::Idle => self.arena.clear_memory_needed(),
                }
                let holders = || {
                    let Usage { budget, used, granted, .. } = self.arena.usage();
                    Holders { budget, used, workers: granted, ahead: window.ahead() }
                };
                let mut shortage = self.shortage.lock().expect("no holder of this lock panics");
                let warning = shortage.observe(&next, Instant::now(), holders);
                (next, warning)
            };
            if let Some(warning) = warning {
                log::warn!("{warning}");
            }
            match next {
                Decision::Read(read) => return Ok(self.extend(read)),
                Decision::Evict(body, loader) => self.evict(body, loader),
                Decision::OutOfMemory => return Err(Halt::OutOfMemory),
                Decision::Idle => return Err(Halt::Idle),
            }
        }
    }

    fn next_demanded(&self) -> Result<CoalescedRead, Halt> {
        loop {
            let (next, more) = {
                let _inside = fork::enter();
                let mut window = self.window();
                (window.next_demanded(|charge, reserved| self.arena.fits(charge, reserved)), window.is_queued())
            };
            match next {
                Some(Decision::Read(read)) => return Ok(self.extend(read)),
                Some(Decision::Evict(body, loader)) => self.evict(body, loader),
                _ if more => {
                    let _inside = fork::enter();
                    self.sources.record_demand_exceeded();
                    return Err(Halt::Limited);
                }
                _ => return Err(Halt::Idle),
            }
        }
    }

    /// Reads the objects of a read and delivers them to their waiters. Returns their loader if one of them was read.
    async fn run(self: &Arc<Self>, read: CoalescedRead) -> Option<u64> {
        let CoalescedRead { entries: reads, needed, .. } = read;
        let loader = reads.first()?.loader;
        let mut readings = Vec::with_capacity(reads.len());
        // Dropped at the end, after the locks are released.
        let mut abandoned = Vec::new();
        let mut ends = Vec::with_capacity(reads.len());
        {
            let _inside = fork::enter();
            let mut window = self.window();
            for reading in reads {
                let (number, object) = (reading.number, reading.object);
                match window.remove_abandoned(number, Waiter::is_closed) {
                    Some(waiter) => {
                        needed.subtract();
                        abandoned.push((waiter, reading));
                        ends.push((number, object, None));
                    }
                    None => readings.push(reading),
                }
            }
        }
        let entries: Vec<_> = readings.iter().map(|reading| (reading.number, reading.object)).collect();
        let results = tokio::select! {
            results = AssertUnwindSafe(self.read_all(readings)).catch_unwind() => match (results, &entries[..]) {
                (Ok(results), _) => results,
                // A panic is delivered to the waiters as an error.
                (Err(_), [(_, object)]) => vec![Some(Err(panicked(*object)))],
                (Err(_), _) => Vec::new(),
            },
            () = needed.none() => Vec::new(),
        };
        let results = results.into_iter().chain(std::iter::repeat_with(|| None));
        ends.extend(entries.into_iter().zip(results).map(|((number, object), result)| (number, object, result)));
        let any_read = ends.into_iter().fold(false, |read, (number, object, result)| {
            let ended = self.end(number, object, loader, result);
            ended || read
        });
        any_read.then_some(loader)
    }

    fn halted(&self, loader: u64, halt: Halt) {
        let is_limited_by_memory = || {
            let _inside = fork::enter();
            self.window().is_limited_by_memory(loader)
        };
        let halt = if halt == Halt::Idle && is_limited_by_memory() { Halt::OutOfMemory } else { halt };
        self.stats.halted(loader, halt);
    }
}

/// Allocates a segment of the arena for a read and drops the reservation that was made for it.
pub(super) struct SegmentAllocator {
    pub(super) arena: Arc<Arena>,
    pub(super) reservation: Reservation,
    pub(super) stats: Arc<AllCounters>,
    pub(super) loader: u64,
}

impl Allocate for SegmentAllocator {
    type Handle = Arc<Segment>;

    fn allocate(self, length: usize) -> io::Result<(Memory, Arc<Segment>)> {
        let segment = self.arena.segment(length as u64)?;
        drop(self.reservation);
        if segment.exceeds_budget() {
            self.stats.add(self.loader, 1, |counters| &counters.over_budget);
        }
        Ok((segment.memory(), segment))
    }
}

impl Prefetcher {
    fn evict(&self, body: FilledSegment, loader: u64) {
        self.stats.add(loader, 1, |counters| &counters.evicted);
        drop(body);
    }

    /// Reads entries with one request. `None` for one that must be read alone.
    async fn read_all(self: &Arc<Self>, mut readings: Vec<EntryRead>) -> Vec<Option<Result<FilledSegment>>> {
        if readings.len() > 1 {
            return self.read_together(readings).await;
        }
        match readings.pop() {
            Some(reading) => vec![Some(self.read(reading).await)],
            None => Vec::new(),
        }
    }

    /// Ends the read of an entry: delivers its result and copies for the entries that follow it. `None` if it was
    /// cancelled or must be read alone. Returns whether the object was read.
    fn end(
        self: &Arc<Self>,
        number: u64,
        object: ObjectId,
        loader: u64,
        result: Option<Result<FilledSegment>>,
    ) -> bool {
        match &result {
            Some(Ok(body)) => self.stats.read(loader, body.result.buffer.len() as u64),
            Some(Err(_)) => self.stats.add(loader, 1, |counters| &counters.failed),
            None => {}
        }
        let read = matches!(result, Some(Ok(_)));
        let followers = {
            let _inside = fork::enter();
            let mut window = self.window();
            window.take_followers(object, |charge, reserved| read && self.arena.fits(charge, reserved))
        };
        // The copies are made first: the receiver of the original may write to it.
        let mut copies = Vec::new();
        for follower in followers {
            let copy = match &result {
                Some(Ok(body)) => self.copy(&body.result).ok(),
                _ => None,
            };
            copies.push((follower, copy));
        }
        let mut deliveries = Vec::new();
        // Dropped after the locks are released: freeing memory may take long.
        let mut discarded = Vec::new();
        {
            let _inside = fork::enter();
            let mut window = self.window();
            if result.is_none() {
                // It exists unless it was cancelled.
                window.requeue_alone(number);
            }
            let first = result.map(|result| (number, Some(result)));
            let others = copies.into_iter().map(|(follower, copy)| (follower, copy.map(Ok)));
            for (number, result) in first.into_iter().chain(others) {
                match result {
                    Some(result) if window.contains(number) => deliveries.extend(window.complete(number, result)),
                    Some(result) => discarded.push(result),
                    None => window.requeue(number),
                }
            }
        }
        drop(discarded);
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
        read
    }

    async fn read(self: &Arc<Self>, reading: EntryRead) -> Result<FilledSegment> {
        let (client, read, more) = self.request(reading.object, reading.loader)?;
        if more {
            pump(self);
        }
        let known = read.size.is_some() || matches!(read.range, Some(ByteRange::Bounded(_)));
        let allocator = self.allocator(reading);
        let (result, segment) = client.get_into(read, allocator).await?;
        if !known {
            self.sources.update_mean_size(result.buffer.len() as u64);
        }
        Ok(FilledSegment { result, segment })
    }

    /// The allocator for the result of a read.
    pub(super) fn allocator(&self, reading: EntryRead) -> SegmentAllocator {
        let EntryRead { reservation, loader, .. } = reading;
        SegmentAllocator { arena: self.arena.clone(), reservation, stats: self.stats.clone(), loader }
    }

    /// The client that reads an object for a loader, its request, and whether the client was just created.
    pub(super) fn request(&self, object: ObjectId, loader: u64) -> Result<(Arc<Client>, ReadRequest, bool)> {
        let (client, read, new) = {
            let _inside = fork::enter();
            self.sources.request(object)?
        };
        Ok((self.stats.client(loader, &client), read, new))
    }

    /// Copies a result to a separate segment.
    fn copy(&self, result: &ReadResult) -> io::Result<FilledSegment> {
        let segment = self.arena.segment(result.buffer.len() as u64)?;
        let (pending, mut dest) = PendingBuffer::new(segment.memory());
        dest.fill(result.buffer.as_slice());
        let buffer = pending.close(dest);
        Ok(FilledSegment { result: ReadResult { buffer, size: result.size, version: result.version.clone() }, segment })
    }

    /// Adds the entries to `read` that are read with the same request: their ranges are ascending.
    pub(super) fn extend(&self, mut read: CoalescedRead) -> CoalescedRead {
        let _inside = fork::enter();
        let [EntryRead { number, object: ObjectId { source, index }, .. }] = read.entries[..] else { return read };
        let sources = self.sources.lock();
        let Some(RegisteredSource::Named(names)) = sources.get(&source) else { return read };
        let Some((first, range)) = names.get(index).and_then(|first| Some((first, range_of(first)?))) else {
            return read;
        };
        let max_bytes = names.part_bytes(first).map_or(MAX_BYTES, |part_bytes| part_bytes.min(MAX_BYTES));
        let mut group = RangeGroup::new(&range, max_bytes);
        let fits = |charge, reserved| self.arena.fits(charge, reserved);
        let mut window = self.window();
        match window.extends(number) {
            Some(true) => {
                let joins = |object: ObjectId| {
                    let range = names.range_within(first, object.index).filter(|_| object.source == source);
                    range.is_some_and(|range| group.join(&range))
                };
                window.extend_demanded(&mut read, joins, fits);
            }
            Some(false) => {
                let object = |(index, range)| (ObjectId { source, index }, range);
                window.extend_announced(&mut read, &mut group, names.after(first).map(object), fits);
                window.extend_announced(&mut read, &mut group, names.before(first).map(object), fits);
            }
            None => {}
        }
        drop(window);
        if read.entries.len() > 1 {
            read.entries.sort_by_cached_key(|entry| names.get(entry.object.index).map(|name| name.start()));
        }
        read
    }

    /// Reads ranges of one object with one request. `None` for an entry that must be read alone: the request failed for
    /// a reason that may not concern all of them.
    pub(super) async fn read_together(
        self: &Arc<Self>,
        readings: Vec<EntryRead>,
    ) -> Vec<Option<Result<FilledSegment>>> {
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

    async fn try_read_together(self: &Arc<Self>, readings: Vec<EntryRead>) -> Result<Vec<FilledSegment>> {
        let first = readings.first().expect("a read has an entry");
        let (first, loader) = (first.object, first.loader);
        let (client, read, more) = self.request(first, loader)?;
        if more {
            pump(self);
        }
        let ranges = {
            let _inside = fork::enter();
            let sources = self.sources.lock();
            let range = |reading: EntryRead| Some((named_range(&sources, reading.object)?, self.allocator(reading)));
            readings.into_iter().map(range).collect::<Option<Vec<_>>>()
        };
        let read = client.get_ranges(read, ranges.ok_or_else(|| unknown_object(first))?).await?;
        Ok(read.into_iter().map(|(result, segment)| FilledSegment { result, segment }).collect())
    }
}

fn panicked(object: ObjectId) -> Error {
    let message = format!("the read of object {} of source {} panicked: a bug", object.index, object.source);
    Error::new(ErrorKind::Io, Operation::Get, "", message)
}
