//! Reads what the window says. Each driver reads one object after the other, on the runtime's threads: nothing feeds them.

use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use super::job::{Halt, Job, Next, Reservation};
use super::shortage::Holders;
use super::{Body, Known, Object, Prefetcher, Wish, broken, unknown};
use crate::arena::{Segment, Usage};
use crate::buffer::{Landing, Memory};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::read::{Landed, Read, Target};
use crate::runtime::runtime;
use crate::types::ByteRange;

/// One of the drivers; not counted any more when it is dropped, however it ended.
struct Driver<'a>(&'a Prefetcher);

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a read gives; an error where it panics, so that who waits for the object hears of it.
async fn unbroken(object: Object, read: impl Future<Output = Result<Body>>) -> Result<Body> {
    let mut read = pin!(read);
    let polled = poll_fn(|context| {
        // It is not polled again after a panic.
        let polled = catch_unwind(AssertUnwindSafe(|| read.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(Err(broken(object))))
    });
    polled.await
}

impl Prefetcher {
    /// Starts as many drivers as there is work, memory and leave for. Why it started no more.
    pub(super) fn pump(self: &Arc<Self>) -> Halt {
        loop {
            let job = match self.admit() {
                Ok(job) => job,
                Err(halt) => return halt,
            };
            let prefetcher = self.clone();
            runtime().spawn(async move { prefetcher.drive(job).await });
        }
    }

    /// A job for one more driver. What somebody waits for is begun at once, whatever is read ahead.
    ///
    /// A thread counts as a driver while it looks for a job, so another thread may be refused for nothing, with a job that
    /// the first one did not see. It says so in `refused`, and whichever of the two comes last looks again.
    fn admit(&self) -> Result<Job, Halt> {
        loop {
            let limit = self.limit();
            let within = |now| (now < limit).then_some(now + 1);
            if self.in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, within).is_ok() {
                let job = self.next_job();
                if job.is_ok() {
                    return job;
                }
                self.in_flight.fetch_sub(1, Ordering::SeqCst);
                if !self.refused.swap(false, Ordering::SeqCst) {
                    return job;
                }
            } else {
                let job = self.next_wished();
                if job.is_ok() {
                    self.in_flight.fetch_add(1, Ordering::SeqCst);
                    return job;
                }
                self.refused.store(true, Ordering::SeqCst);
                if self.in_flight.load(Ordering::SeqCst) >= limit {
                    return job;
                }
            }
        }
    }

    fn next_job(&self) -> Result<Job, Halt> {
        loop {
            let (next, warning) = {
                let _inside = fork::enter();
                let mut window = self.window();
                let next = window.next(|charge, reserved| self.arena.fits(charge, reserved));
                // Before another driver decides: the last word is that of who looked last.
                match next {
                    Next::Starved if self.arena.starve() => continue,
                    Next::Starved => {}
                    Next::Start(_) | Next::Evict(_) | Next::Idle => self.arena.sate(),
                }
                let holders = || {
                    let Usage { budget, used, granted, .. } = self.arena.usage();
                    Holders { budget, used, workers: granted, ahead: window.ahead() }
                };
                let mut shortage = self.shortage.lock().expect("no holder of this lock panics");
                let warning = shortage.note(&next, Instant::now(), holders);
                (next, warning)
            };
            if let Some(warning) = warning {
                log::warn!("{warning}");
            }
            match next {
                Next::Start(job) => return Ok(job),
                Next::Evict(body) => self.evict(body),
                Next::Starved => return Err(Halt::Starved),
                Next::Idle => return Err(Halt::Idle),
            }
        }
    }

    fn next_wished(&self) -> Result<Job, Halt> {
        loop {
            let (next, more) = {
                let _inside = fork::enter();
                let mut window = self.window();
                (window.next_wished(|charge, reserved| self.arena.fits(charge, reserved)), window.is_queued())
            };
            match next {
                Some(Next::Start(job)) => return Ok(job),
                Some(Next::Evict(body)) => self.evict(body),
                _ if more => {
                    self.reach();
                    return Err(Halt::Limited);
                }
                _ => return Err(Halt::Idle),
            }
        }
    }

    fn evict(&self, body: Body) {
        self.stats.evicted();
        drop(body);
    }

    async fn drive(self: Arc<Self>, mut job: Job) {
        let driver = Driver(&self);
        loop {
            let read = self.run(job).await;
            // Another driver may have room now, beside this one's next job.
            let halt = self.pump();
            let over = self.in_flight.load(Ordering::Acquire) > self.limit();
            let next = if over { Err(halt) } else { self.next_job() };
            if read {
                self.stats.halted(next.as_ref().err().copied().unwrap_or(halt));
            }
            match next {
                Ok(next) => job = next,
                Err(_) => break,
            }
        }
        drop(driver);
        // What was announced since this driver looked.
        self.pump();
    }

    /// Whether it read an object.
    async fn run(self: &Arc<Self>, job: Job) -> bool {
        let Job { number, object, reservation, cancelled, .. } = job;
        let given_up = {
            let _inside = fork::enter();
            self.window().give_up(number, Wish::gone)
        };
        let result = if given_up.is_some() {
            None
        } else {
            tokio::select! {
                result = unbroken(object, self.read(object, reservation)) => Some(result),
                () = cancelled.notified() => None,
            }
        };
        match &result {
            Some(Ok(body)) => self.stats.read(body.landed.buffer.len() as u64),
            Some(Err(_)) => self.stats.failed(),
            None => {}
        }
        let read = matches!(result, Some(Ok(_)));
        let followers = {
            let _inside = fork::enter();
            let mut window = self.window();
            window.followers(object, |charge, reserved| read && self.arena.fits(charge, reserved))
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
        // Freed when nothing is locked: it may take the system a while.
        let mut unwanted = Vec::new();
        {
            let _inside = fork::enter();
            let mut window = self.window();
            let first = result.map(|result| (number, Some(result)));
            let others = copies.into_iter().map(|(follower, copy)| (follower, copy.map(Ok)));
            for (number, result) in first.into_iter().chain(others) {
                match result {
                    Some(result) if window.wants(number) => deliveries.extend(window.done(number, result)),
                    Some(result) => unwanted.push(result),
                    None => window.again(number),
                }
            }
        }
        drop(unwanted);
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
        read
    }

    async fn read(self: &Arc<Self>, object: Object, reservation: Reservation) -> Result<Body> {
        let (client, read, more) = self.request(object)?;
        if more {
            self.pump();
        }
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

    /// Who reads an object, how, and whether more reads are permitted since.
    fn request(&self, object: Object) -> Result<(Arc<crate::client::Client>, Read, bool)> {
        let _inside = fork::enter();
        let mut sources = self.sources();
        let (manifest, clients) = match sources.get_mut(&object.source).ok_or_else(|| unknown(object))? {
            Known::Listed(source) => (&source.manifest, &source.clients),
            Known::Named(names) => {
                let name = names.get(object.index).ok_or_else(|| unknown(object))?;
                let (client, new) = names.client(&name)?;
                if new {
                    self.see_metrics([&client]);
                    self.see_permits(&sources);
                }
                return Ok((client, name.read(), new));
            }
        };
        let entry = usize::try_from(object.index).ok().and_then(|index| manifest.get(index));
        let entry = entry.ok_or_else(|| unknown(object))?;
        let base = manifest.bases().iter().position(|base| base == entry.base);
        let client = base.and_then(|base| clients.get(base)).ok_or_else(|| unknown(object))?;
        let read = Read { size: entry.size, version: entry.version, ..Read::whole(entry.key) };
        Ok((client.clone(), read, false))
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
