//! How many requests are in flight: leave to have one, in the order in which it was asked for. The number is fixed, or
//! follows what pays (`adapt`). Knows nothing of what the requests do.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::adapt::{Adapt, Seen};
use crate::error::{ErrorKind, Retry};

/// Work that a request is, beside its bytes: small objects are limited by their number.
const REQUEST_BYTES: u64 = 64 << 10;
/// How often what was seen is told.
const TELL_EVERY: Duration = Duration::from_millis(50);
/// What is asked for by somebody who waits, and what is written, has so many permits that announced reads leave alone.
const RESERVE: usize = 4;
/// So many requests for each permit may wait to be tried again, and others be made in their place.
const RESTING: usize = 2;

/// Leave to have one request in flight; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    permits: Arc<Permits>,
    /// What the request moved, and until when.
    moved: Option<(u64, Instant)>,
}

impl Permit {
    /// The request moved so many bytes, and ended now.
    pub(crate) fn moved(&mut self, bytes: u64, now: Instant) {
        self.moved = Some((bytes, now));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let (bytes, now) = self.moved.unwrap_or_else(|| (0, Instant::now()));
        self.permits.give_back(bytes, now);
    }
}

/// A request that waits to be tried again.
#[derive(Debug)]
pub(crate) struct Resting<'a>(&'a AtomicUsize);

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The permits of one account.
#[derive(Debug)]
pub struct Permits {
    semaphore: Semaphore,
    limit: AtomicUsize,
    most: usize,
    /// Permits that are to vanish when they are given back.
    owed: AtomicUsize,
    /// Requests that failed and wait to be tried again.
    resting: AtomicUsize,
    /// `None` where the number is fixed.
    adapt: Option<Mutex<Adapt>>,
    began: Instant,
    tell_at_us: AtomicU64,
    answers: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    work: AtomicU64,
    reached: AtomicBool,
    /// When the store last asked for fewer requests; 0 for never.
    throttled_us: AtomicU64,
}

impl Permits {
    /// `start` permits, at least one; with a `cap` their number follows what pays, up to that.
    pub fn new(start: usize, cap: Option<usize>) -> Arc<Self> {
        let most = cap.unwrap_or(start).max(1);
        let limit = start.clamp(1, most);
        Arc::new(Self {
            semaphore: Semaphore::new(limit),
            limit: AtomicUsize::new(limit),
            most,
            owed: AtomicUsize::new(0),
            resting: AtomicUsize::new(0),
            adapt: cap.map(|cap| Mutex::new(Adapt::new(limit, cap))),
            began: Instant::now(),
            tell_at_us: AtomicU64::new(0),
            answers: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            work: AtomicU64::new(0),
            reached: AtomicBool::new(false),
            throttled_us: AtomicU64::new(0),
        })
    }

    /// How many there are now.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// How many there may ever be.
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many of them are for reads that nobody waits for yet.
    pub fn ahead(&self) -> usize {
        let limit = self.limit();
        limit - RESERVE.min(limit / 4)
    }

    /// How many requests wait to be tried again, and need no permit meanwhile: at most so many that the retries of all of
    /// them, and of those in flight, are within what a client may spend on an outage.
    pub fn resting(&self) -> usize {
        self.resting.load(Ordering::Relaxed).min(RESTING * self.ahead())
    }

    /// A request waits to be tried again until what this returns is dropped.
    pub(crate) fn rest(&self) -> Resting<'_> {
        self.resting.fetch_add(1, Ordering::Relaxed);
        Resting(&self.resting)
    }

    /// Waits for a permit.
    pub async fn acquire(self: &Arc<Self>) -> Permit {
        self.semaphore.acquire().await.expect("the semaphore is never closed").forget();
        if self.semaphore.available_permits() == 0 {
            self.reach();
        }
        Permit { permits: self.clone(), moved: None }
    }

    /// A permit, if one is free and nobody waits for it.
    pub fn try_acquire(self: &Arc<Self>) -> Option<Permit> {
        self.semaphore.try_acquire().ok()?.forget();
        Some(Permit { permits: self.clone(), moved: None })
    }

    /// Says that somebody would have used more permits than there are.
    pub fn reach(&self) {
        if !self.reached.load(Ordering::Relaxed) {
            self.reached.store(true, Ordering::Relaxed);
        }
    }

    /// Records how a request failed. Only throttling and failed connects are refusals: a server error, a reset or a
    /// timeout says nothing of how many requests the store can take.
    pub(crate) fn failed(&self, kind: ErrorKind) {
        if kind.retry() != Retry::Never {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        if matches!(kind, ErrorKind::Throttled | ErrorKind::Connect) {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        if kind == ErrorKind::Throttled {
            self.throttled_us.store(self.us(Instant::now()).max(1), Ordering::Relaxed);
        }
    }

    /// Whether the store asked for fewer requests within `past`.
    pub(crate) fn was_throttled(&self, past: Duration) -> bool {
        let at_us = self.throttled_us.load(Ordering::Relaxed);
        at_us > 0 && Duration::from_micros(self.us(Instant::now()).saturating_sub(at_us)) < past
    }

    fn us(&self, at: Instant) -> u64 {
        u64::try_from(at.duration_since(self.began).as_micros()).expect("no process lives so long")
    }

    fn give_back(&self, bytes: u64, now: Instant) {
        let owed = self.owed.load(Ordering::Relaxed) > 0
            && self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |owed| owed.checked_sub(1)).is_ok();
        if !owed {
            self.semaphore.add_permits(1);
        }
        let Some(adapt) = &self.adapt else { return };
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.work.fetch_add(bytes + REQUEST_BYTES, Ordering::Relaxed);
        let now_us = self.us(now);
        if now_us < self.tell_at_us.load(Ordering::Relaxed) {
            return;
        }
        // Whoever holds it tells.
        if let Ok(mut adapt) = adapt.try_lock() {
            self.tell_at_us.store(now_us + TELL_EVERY.as_micros() as u64, Ordering::Relaxed);
            // A request that failed was counted as an answer when its permit came back, and is no work.
            let failed = self.failed.swap(0, Ordering::Relaxed);
            let seen = Seen {
                answers: self.answers.swap(0, Ordering::Relaxed),
                refused: self.refused.swap(0, Ordering::Relaxed),
                work: self.work.swap(0, Ordering::Relaxed).saturating_sub(failed * REQUEST_BYTES),
                reached: self.reached.swap(false, Ordering::Relaxed),
            };
            self.resize(adapt.tell(Duration::from_micros(now_us), seen));
        }
    }

    /// Makes it `limit` permits; those in use beyond that vanish as they are given back. One call at a time.
    fn resize(&self, limit: usize) {
        let before = self.limit.swap(limit, Ordering::Relaxed);
        if limit < before {
            let less = before - limit;
            let owed = less - self.semaphore.forget_permits(less);
            self.owed.fetch_add(owed, Ordering::Relaxed);
        } else if limit > before {
            let mut more = limit - before;
            let paid =
                self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |owed| Some(owed.saturating_sub(more)));
            more -= paid.unwrap_or(0).min(more);
            self.semaphore.add_permits(more);
            log::debug!("{limit} requests at a time from here, {before} before");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::within;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn permits_in_use_vanish_when_they_are_given_back_and_come_again() {
        let permits = Permits::new(8, None);
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(permits.acquire().await);
        }
        assert!(permits.try_acquire().is_none());
        permits.resize(3);
        held.truncate(4);
        assert!(permits.try_acquire().is_none());
        permits.resize(5);
        assert_eq!(held.len() + 1, 5);
        held.extend(permits.try_acquire());
        assert!(permits.try_acquire().is_none());
        drop(held);
        let all: Vec<_> = std::iter::from_fn(|| permits.try_acquire()).collect();
        assert_eq!(all.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_served_in_order_and_one_who_gave_up_keeps_nothing() {
        let permits = Permits::new(1, None);
        let held = permits.acquire().await;
        let mut gave_up = Box::pin(permits.acquire());
        assert!(within(Duration::ZERO, &mut gave_up).await.is_none());
        let mut second = Box::pin(permits.acquire());
        assert!(within(Duration::ZERO, &mut second).await.is_none());
        drop(gave_up);
        drop(held);
        // It is the next in the line's, not whoever's tries now.
        assert!(permits.try_acquire().is_none());
        drop(second.await);
        assert!(permits.try_acquire().is_some());
    }

    /// `lanes` tasks that make requests of 20 ms one after the other for `seconds`.
    async fn run(permits: &Arc<Permits>, lanes: usize, seconds: u32, kind: Option<ErrorKind>) {
        let end = Instant::now() + seconds * SECOND;
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..lanes {
            let permits = permits.clone();
            all.spawn(async move {
                while Instant::now() < end {
                    let mut permit = permits.acquire().await;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    permit.moved(4096, Instant::now());
                    kind.into_iter().for_each(|kind| permits.failed(kind));
                }
            });
        }
        all.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn they_grow_where_many_wait_and_shrink_where_the_store_refuses() {
        let permits = Permits::new(64, Some(256));
        run(&permits, 20, 3, None).await;
        assert_eq!(permits.limit(), 64);
        run(&permits, 500, 3, None).await;
        assert_eq!(permits.limit(), 256);
        assert!(!permits.was_throttled(10 * SECOND));
        run(&permits, 500, 15, Some(ErrorKind::Throttled)).await;
        assert_eq!((permits.limit(), permits.ahead()), (8, 6));
        assert!(permits.was_throttled(10 * SECOND));
        tokio::time::sleep(10 * SECOND).await;
        assert!(!permits.was_throttled(10 * SECOND));
    }

    #[test]
    fn requests_that_wait_to_be_tried_again_are_counted_up_to_a_bound() {
        let permits = Permits::new(8, None);
        let resting: Vec<_> = (0..5).map(|_| permits.rest()).collect();
        assert_eq!((permits.resting(), permits.ahead()), (5, 6));
        let more: Vec<_> = (0..50).map(|_| permits.rest()).collect();
        assert_eq!(permits.resting(), 12);
        drop((resting, more));
        assert_eq!(permits.resting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fixed_number_stays() {
        let permits = Permits::new(16, None);
        run(&permits, 100, 2, None).await;
        run(&permits, 100, 2, Some(ErrorKind::Throttled)).await;
        assert_eq!((permits.limit(), permits.most(), permits.ahead()), (16, 16, 12));
    }
}
