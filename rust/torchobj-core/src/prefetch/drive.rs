//! Reads what the window says. Each driver reads one object after the other, on the runtime's threads: nothing feeds them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::job::{Job, Next, Reservation};
use super::{Body, Known, Prefetcher, unknown};
use crate::arena::Segment;
use crate::buffer::{Landing, Memory};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::read::{Landed, Read, Target};
use crate::runtime::runtime;
use crate::types::ByteRange;

impl Prefetcher {
    /// Starts as many drivers as there is work, memory and leave for.
    pub(super) fn pump(self: &Arc<Self>) {
        while let Some(job) = self.admit() {
            let prefetcher = self.clone();
            runtime().spawn(async move { prefetcher.drive(job).await });
        }
    }

    /// A job for one more driver.
    fn admit(&self) -> Option<Job> {
        let limit = self.limit();
        let admitted =
            self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now < limit).then_some(now + 1));
        admitted.ok()?;
        let job = self.next_job();
        if job.is_none() {
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
        job
    }

    fn next_job(&self) -> Option<Job> {
        loop {
            let (next, starved) = {
                let _inside = fork::enter();
                let mut window = self.window();
                let reserved = window.reserved();
                let next = window.next(self.arena.budget(), |charge| self.arena.fits(charge, reserved));
                let starved = matches!(next, Next::Starved);
                (next, starved)
            };
            self.arena.starve(starved);
            match next {
                Next::Start(job) => return Some(job),
                Next::Evict(body) => {
                    self.stats.evicted();
                    drop(body);
                }
                Next::Idle | Next::Starved => return None,
            }
        }
    }

    async fn drive(self: Arc<Self>, mut job: Job) {
        loop {
            self.run(job).await;
            // Another driver may have room now, beside this one's next job.
            self.pump();
            if self.in_flight.load(Ordering::Acquire) > self.limit() {
                break;
            }
            match self.next_job() {
                Some(next) => job = next,
                None => break,
            }
        }
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        // What was announced since this driver looked.
        self.pump();
    }

    async fn run(self: &Arc<Self>, job: Job) {
        let Job { number, object, reservation, cancelled } = job;
        let began = Instant::now();
        let result = tokio::select! {
            result = self.read(object, reservation) => Some(result),
            () = cancelled.notified() => None,
        };
        match &result {
            Some(Ok(body)) => self.stats.read(body.landed.buffer.len() as u64, began.elapsed()),
            Some(Err(_)) => self.stats.failed(),
            None => {}
        }
        let followers = {
            let _inside = fork::enter();
            let read = matches!(result, Some(Ok(_)));
            let mut window = self.window();
            let reserved = window.reserved();
            window.followers(object, |charge| read && self.arena.fits(charge, reserved))
        };
        // Before the first one is anybody's, who may write to it.
        let mut copies = Vec::new();
        for follower in followers {
            let copy = match &result {
                Some(Ok(body)) => self.copy(&body.landed).ok(),
                _ => None,
            };
            copies.push((follower, copy));
        }
        let mut deliveries = Vec::new();
        {
            let _inside = fork::enter();
            let mut window = self.window();
            if let Some(result) = result {
                deliveries.extend(window.done(number, result));
            }
            for (follower, copy) in copies {
                match copy {
                    Some(body) => deliveries.extend(window.done(follower, Ok(body))),
                    None => window.again(follower),
                }
            }
        }
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
    }

    async fn read(self: &Arc<Self>, object: super::Object, reservation: Reservation) -> Result<Body> {
        let (client, read) = self.request(object)?;
        let known = read.size.is_some() || matches!(read.range, Some(ByteRange::Bounded(_)));
        let place = Arc::new(std::sync::Mutex::new(None::<Arc<Segment>>));
        let (arena, noted) = (self.arena.clone(), place.clone());
        let make = move |len: usize| -> io::Result<Memory> {
            let segment = arena.segment(len as u64)?;
            drop(reservation);
            let memory = segment.memory();
            *noted.lock().expect("no holder of this lock panics") = Some(segment);
            Ok(memory)
        };
        let landed = client.get(Read { into: Target::Made(Box::new(make)), ..read }).await?;
        if !known {
            self.learn(landed.buffer.len() as u64);
        }
        let segment = place.lock().expect("no holder of this lock panics").take();
        let segment = segment.ok_or_else(|| {
            Error::new(ErrorKind::Io, Operation::Get, client.store().url(""), "a body landed nowhere: a bug")
        })?;
        Ok(Body { landed, segment })
    }

    fn request(&self, object: super::Object) -> Result<(Arc<crate::client::Client>, Read)> {
        let _inside = fork::enter();
        let mut sources = self.sources();
        let (manifest, clients) = match sources.get_mut(&object.source).ok_or_else(|| unknown(object))? {
            Known::Listed(source) => (&source.manifest, &source.clients),
            Known::Named(names) => {
                let name = names.get(object.index).ok_or_else(|| unknown(object))?;
                return Ok((names.client(&name)?, name.read()));
            }
        };
        let entry = usize::try_from(object.index).ok().and_then(|index| manifest.get(index));
        let entry = entry.ok_or_else(|| unknown(object))?;
        let base = manifest.bases().iter().position(|base| base == entry.base);
        let client = base.and_then(|base| clients.get(base)).ok_or_else(|| unknown(object))?;
        let read = Read { size: entry.size, version: entry.version, ..Read::whole(entry.key) };
        Ok((client.clone(), read))
    }

    fn learn(&self, size: u64) {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        self.mean_bytes.store(mean - mean / 16 + size / 16, Ordering::Relaxed);
    }

    /// The same bytes in a segment of their own.
    fn copy(&self, landed: &Landed) -> io::Result<Body> {
        let segment = self.arena.segment(landed.buffer.len() as u64)?;
        let (landing, mut dest) = Landing::new(segment.memory());
        dest.fill(landed.buffer.as_slice());
        drop(dest);
        let buffer = landing.finish(landed.buffer.len()).map_err(|_| io::Error::other("its one writer was dropped"))?;
        Ok(Body { landed: Landed { buffer, size: landed.size, version: landed.version.clone() }, segment })
    }
}
