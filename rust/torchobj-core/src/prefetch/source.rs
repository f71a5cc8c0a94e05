//! Runs the reads that `window` selects, as a source of the engine. `window` determines their order.

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::FutureExt;

use super::job::{Job, Next, Reading, Reservation};
use super::shortage::Holders;
use super::stats::AllCounters;
use super::{Body, KnownSource, Object, Prefetcher, Waiter, panicked, unknown_object};
use crate::arena::{Arena, Segment, Usage};
use crate::buffer::{Memory, PendingBuffer};
use crate::client::Client;
use crate::engine::{Allocate, Halt, Source, Tasks, pump};
use crate::error::Result;
use crate::fork;
use crate::read::{Read, ReadResult};
use crate::types::ByteRange;

impl Source for Prefetcher {
    type Item = Job;
    /// The loader that the object was read for.
    type Done = u64;

    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn limit(&self) -> usize {
        self.limit()
    }

    fn next(&self) -> Result<Job, Halt> {
        self.next_job()
    }

    fn next_demanded(&self) -> Result<Job, Halt> {
        self.next_demanded()
    }

    fn run(self: &Arc<Self>, job: Job) -> impl Future<Output = Option<u64>> + Send {
        self.run_job(job)
    }

    fn halted(&self, loader: u64, halt: Halt) {
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
            self.stats.exceeded_budget(self.loader);
        }
        Ok((segment.memory(), segment))
    }
}

impl Prefetcher {
    /// Starts reads as far as objects, memory and permits are available.
    pub(super) fn pump(self: &Arc<Self>) {
        pump(self);
    }

    fn next_job(&self) -> Result<Job, Halt> {
        loop {
            let (next, warning) = {
                let _inside = fork::enter();
                let mut window = self.window();
                let next = window.next(|charge, reserved| self.arena.fits(charge, reserved));
                // Under the lock of the window: the last decision sets the flag.
                match next {
                    Next::OutOfMemory if self.arena.set_memory_needed() => continue,
                    Next::OutOfMemory => {}
                    Next::Start(_) | Next::Evict(..) | Next::Idle => self.arena.clear_memory_needed(),
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
                Next::Start(job) => return Ok(self.extend(job)),
                Next::Evict(body, loader) => self.evict(body, loader),
                Next::OutOfMemory => return Err(Halt::OutOfMemory),
                Next::Idle => return Err(Halt::Idle),
            }
        }
    }

    fn next_demanded(&self) -> Result<Job, Halt> {
        loop {
            let (next, more) = {
                let _inside = fork::enter();
                let mut window = self.window();
                (window.next_demanded(|charge, reserved| self.arena.fits(charge, reserved)), window.is_queued())
            };
            match next {
                Some(Next::Start(job)) => return Ok(self.extend(job)),
                Some(Next::Evict(body, loader)) => self.evict(body, loader),
                _ if more => {
                    self.record_demand_exceeded();
                    return Err(Halt::Limited);
                }
                _ => return Err(Halt::Idle),
            }
        }
    }

    fn evict(&self, body: Body, loader: u64) {
        self.stats.evicted(loader);
        drop(body);
    }

    /// Reads the objects of a job and delivers them to their waiters. Returns their loader if one of them was read.
    async fn run_job(self: &Arc<Self>, job: Job) -> Option<u64> {
        let Job { first, neighbours, needed, .. } = job;
        let loader = first.loader;
        let mut readings = Vec::with_capacity(1 + neighbours.len());
        // Dropped at the end, after the locks are released.
        let mut abandoned = Vec::new();
        let mut ends = Vec::with_capacity(1 + neighbours.len());
        {
            let _inside = fork::enter();
            let mut window = self.window();
            for reading in std::iter::once(first).chain(neighbours) {
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
        let results = if readings.is_empty() {
            Vec::new()
        } else {
            tokio::select! {
                results = AssertUnwindSafe(self.read_all(readings)).catch_unwind() => match (results, &entries[..]) {
                    (Ok(results), _) => results,
                    // A panic is delivered to the waiters as an error.
                    (Err(_), [(_, object)]) => vec![Some(Err(panicked(*object)))],
                    (Err(_), _) => Vec::new(),
                },
                () = needed.none() => Vec::new(),
            }
        };
        let results = results.into_iter().chain(std::iter::repeat_with(|| None));
        ends.extend(entries.into_iter().zip(results).map(|((number, object), result)| (number, object, result)));
        let any_read = ends.into_iter().fold(false, |read, (number, object, result)| {
            let ended = self.end(number, object, loader, result);
            ended || read
        });
        any_read.then_some(loader)
    }

    /// Reads the objects of a job. `None` for one that must be read alone.
    async fn read_all(self: &Arc<Self>, mut readings: Vec<Reading>) -> Vec<Option<Result<Body>>> {
        match readings.pop() {
            Some(reading) if readings.is_empty() => {
                vec![Some(self.read(reading).await)]
            }
            last => {
                readings.extend(last);
                self.read_together(readings).await
            }
        }
    }

    /// Ends the read of an entry: delivers its result and copies for the entries that follow it. `None` if it was
    /// cancelled or must be read alone. Returns whether the object was read.
    fn end(self: &Arc<Self>, number: u64, object: Object, loader: u64, result: Option<Result<Body>>) -> bool {
        match &result {
            Some(Ok(body)) => self.stats.read(loader, body.result.buffer.len() as u64),
            Some(Err(_)) => self.stats.failed(loader),
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

    async fn read(self: &Arc<Self>, reading: Reading) -> Result<Body> {
        let (client, read, more) = self.request(reading.object, reading.loader)?;
        if more {
            self.pump();
        }
        let known = read.size.is_some() || matches!(read.range, Some(ByteRange::Bounded(_)));
        let allocator = self.allocator(reading);
        let (result, segment) = client.get_into(read, allocator).await?;
        if !known {
            self.update_mean_size(result.buffer.len() as u64);
        }
        Ok(Body { result, segment })
    }

    /// The allocator for the result of a read.
    pub(super) fn allocator(&self, reading: Reading) -> SegmentAllocator {
        let Reading { reservation, loader, .. } = reading;
        SegmentAllocator { arena: self.arena.clone(), reservation, stats: self.stats.clone(), loader }
    }

    /// The client that reads an object for a loader, its request, and whether the client was just created.
    pub(super) fn request(&self, object: Object, loader: u64) -> Result<(Arc<Client>, Read, bool)> {
        let (client, read, new) = self.unmeasured_request(object)?;
        Ok((self.stats.client(loader, &client), read, new))
    }

    fn unmeasured_request(&self, object: Object) -> Result<(Arc<Client>, Read, bool)> {
        let _inside = fork::enter();
        let mut sources = self.sources();
        let (manifest, clients, pinned) = match sources.get_mut(&object.source).ok_or_else(|| unknown_object(object))? {
            KnownSource::Listed(source) => (&source.manifest, &source.clients, source.pinned),
            KnownSource::Named(names) => {
                let name = names.get(object.index).ok_or_else(|| unknown_object(object))?;
                let (client, new) = names.client(&name)?;
                if new {
                    self.add_metrics([&client]);
                    self.update_limits(&sources);
                }
                return Ok((client, name.read(), new));
            }
        };
        let entry = usize::try_from(object.index).ok().and_then(|index| manifest.get(index));
        let entry = entry.ok_or_else(|| unknown_object(object))?;
        let base = manifest.bases().iter().position(|base| base == entry.base);
        let client = base.and_then(|base| clients.get(base)).ok_or_else(|| unknown_object(object))?;
        let read = Read::listed(entry, pinned);
        Ok((client.clone(), read, false))
    }

    fn update_mean_size(&self, size: u64) {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        self.mean_bytes.store(mean - mean / 16 + size / 16, Ordering::Relaxed);
    }

    /// Copies a result to a separate segment.
    fn copy(&self, result: &ReadResult) -> io::Result<Body> {
        let segment = self.arena.segment(result.buffer.len() as u64)?;
        let (pending, mut dest) = PendingBuffer::new(segment.memory());
        dest.fill(result.buffer.as_slice());
        drop(dest);
        let buffer = pending.finish(result.buffer.len()).map_err(|_| io::Error::other("its one writer was dropped"))?;
        Ok(Body { result: ReadResult { buffer, size: result.size, version: result.version.clone() }, segment })
    }
}
