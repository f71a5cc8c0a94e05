//! The limit on concurrent requests. Permits are granted in the order of the calls. The limit is fixed, or adapts to the
//! measured throughput (`aimd`).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::aimd::{Aimd, Sample};
use crate::error::{ErrorKind, Retry};

/// Work of a request in addition to its bytes: the throughput of small objects is limited by the number of requests.
const REQUEST_BYTES: u64 = 64 << 10;
/// Interval between two samples for the controller.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Permits that announced reads do not use: they are reserved for demanded reads and for writes.
const DEMAND_RESERVE: usize = 4;
/// Maximum number of requests per permit that are backing off while other requests are made in their place.
const MAX_BACKING_OFF: usize = 2;

/// Permit for one in-flight request. Released on drop.
#[derive(Debug)]
pub struct Permit {
    permits: Arc<ConcurrencyLimit>,
    /// Bytes that the request transferred, and when it ended.
    transferred: Option<(u64, Instant)>,
}

impl Permit {
    /// Records that the request ended at `now` and transferred `bytes`.
    pub(crate) fn transferred(&mut self, bytes: u64, now: Instant) {
        self.transferred = Some((bytes, now));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let (bytes, now) = self.transferred.unwrap_or_else(|| (0, Instant::now()));
        self.permits.release(bytes, now);
    }
}

/// A request that is backing off. Dropping it ends the backoff.
#[derive(Debug)]
pub(crate) struct BackingOff<'a>(&'a AtomicUsize);

impl Drop for BackingOff<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The limit on concurrent requests of one account, shared by its clients.
#[derive(Debug)]
pub struct ConcurrencyLimit {
    semaphore: Semaphore,
    limit: AtomicUsize,
    max: usize,
    /// Number of permits to remove when they are released: the limit was decreased while they were in use.
    excess: AtomicUsize,
    /// Number of requests that are backing off.
    backing_off: AtomicUsize,
    /// `None` if the limit is fixed.
    aimd: Option<Mutex<Aimd>>,
    created: Instant,
    /// The fields from here on are the counts since the last sample, except for `throttled_us`.
    next_sample_us: AtomicU64,
    responses: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    work: AtomicU64,
    demand_exceeded: AtomicBool,
    /// When the store last throttled a request; 0 for never.
    throttled_us: AtomicU64,
}

impl ConcurrencyLimit {
    /// A limit of `start` requests, at least one. With a `cap` the limit adapts to the throughput, up to `cap`.
    pub fn new(start: usize, cap: Option<usize>) -> Arc<Self> {
        let max = cap.unwrap_or(start).max(1);
        let limit = start.clamp(1, max);
        Arc::new(Self {
            semaphore: Semaphore::new(limit),
            limit: AtomicUsize::new(limit),
            max,
            excess: AtomicUsize::new(0),
            backing_off: AtomicUsize::new(0),
            aimd: cap.map(|cap| Mutex::new(Aimd::new(limit, cap))),
            created: Instant::now(),
            next_sample_us: AtomicU64::new(0),
            responses: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            work: AtomicU64::new(0),
            demand_exceeded: AtomicBool::new(false),
            throttled_us: AtomicU64::new(0),
        })
    }

    /// The current limit.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// The largest value that the limit can have.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Number of permits in use.
    pub fn in_use(&self) -> usize {
        let granted = self.limit() + self.excess.load(Ordering::Relaxed);
        granted.saturating_sub(self.semaphore.available_permits())
    }

    /// The part of the limit that announced reads may use.
    pub fn read_ahead_limit(&self) -> usize {
        let limit = self.limit();
        limit - DEMAND_RESERVE.min(limit / 4)
    }

    /// Number of requests that are backing off and hold no permit. It is bounded, so that the retry quota of a client
    /// suffices for the retries of these requests and of those in flight.
    pub fn backing_off(&self) -> usize {
        self.backing_off.load(Ordering::Relaxed).min(MAX_BACKING_OFF * self.read_ahead_limit())
    }

    /// Records that a request backs off until the returned value is dropped.
    pub(crate) fn back_off(&self) -> BackingOff<'_> {
        self.backing_off.fetch_add(1, Ordering::Relaxed);
        BackingOff(&self.backing_off)
    }

    /// Waits for a permit.
    pub async fn acquire(self: &Arc<Self>) -> Permit {
        self.semaphore.acquire().await.expect("the semaphore is never closed").forget();
        if self.semaphore.available_permits() == 0 {
            self.demand_exceeded();
        }
        Permit { permits: self.clone(), transferred: None }
    }

    /// Takes a permit if one is free and no other call waits for it.
    pub fn try_acquire(self: &Arc<Self>) -> Option<Permit> {
        self.semaphore.try_acquire().ok()?.forget();
        Some(Permit { permits: self.clone(), transferred: None })
    }

    /// Records that demand exceeded the limit.
    pub fn demand_exceeded(&self) {
        if !self.demand_exceeded.load(Ordering::Relaxed) {
            self.demand_exceeded.store(true, Ordering::Relaxed);
        }
    }

    /// Records how a request failed. Only throttling and failed connects are refusals: a server error, a reset or a
    /// timeout does not depend on the number of concurrent requests.
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

    /// Returns whether the store throttled a request within `past`.
    pub(crate) fn was_throttled(&self, past: Duration) -> bool {
        let at_us = self.throttled_us.load(Ordering::Relaxed);
        at_us > 0 && Duration::from_micros(self.us(Instant::now()).saturating_sub(at_us)) < past
    }

    fn us(&self, at: Instant) -> u64 {
        u64::try_from(at.duration_since(self.created).as_micros()).expect("2^64 µs are more than 500 000 years")
    }

    fn release(&self, bytes: u64, now: Instant) {
        let removed = self.excess.load(Ordering::Relaxed) > 0
            && self.excess.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |excess| excess.checked_sub(1)).is_ok();
        if !removed {
            self.semaphore.add_permits(1);
        }
        let Some(aimd) = &self.aimd else { return };
        self.responses.fetch_add(1, Ordering::Relaxed);
        self.work.fetch_add(bytes + REQUEST_BYTES, Ordering::Relaxed);
        let now_us = self.us(now);
        if now_us < self.next_sample_us.load(Ordering::Relaxed) {
            return;
        }
        // Another thread that holds the lock is taking the sample.
        if let Ok(mut aimd) = aimd.try_lock() {
            self.next_sample_us.store(now_us + SAMPLE_INTERVAL.as_micros() as u64, Ordering::Relaxed);
            // A failed request was counted as a response when its permit was released, but did no work.
            let failed = self.failed.swap(0, Ordering::Relaxed);
            let sample = Sample {
                responses: self.responses.swap(0, Ordering::Relaxed),
                refused: self.refused.swap(0, Ordering::Relaxed),
                work: self.work.swap(0, Ordering::Relaxed).saturating_sub(failed * REQUEST_BYTES),
                demand_exceeded: self.demand_exceeded.swap(false, Ordering::Relaxed),
            };
            self.resize(aimd.update(Duration::from_micros(now_us), sample));
        }
    }

    /// Changes the number of permits to `limit`. Permits in use beyond it are removed when they are released. Calls must
    /// not overlap.
    fn resize(&self, limit: usize) {
        let before = self.limit.swap(limit, Ordering::Relaxed);
        if limit < before {
            let fewer = before - limit;
            let in_use = fewer - self.semaphore.forget_permits(fewer);
            self.excess.fetch_add(in_use, Ordering::Relaxed);
        } else if limit > before {
            let mut more = limit - before;
            let kept = self
                .excess
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |excess| Some(excess.saturating_sub(more)));
            more -= kept.unwrap_or(0).min(more);
            self.semaphore.add_permits(more);
            log::debug!("limit on concurrent requests increased from {before} to {limit}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::within;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn excess_permits_are_removed_on_release_and_added_when_the_limit_grows() {
        let permits = ConcurrencyLimit::new(8, None);
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(permits.acquire().await);
        }
        assert!(permits.try_acquire().is_none());
        permits.resize(3);
        assert_eq!(permits.in_use(), 8);
        held.truncate(4);
        assert_eq!(permits.in_use(), 4);
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
    async fn permits_are_granted_in_order_and_a_cancelled_wait_keeps_none() {
        let permits = ConcurrencyLimit::new(1, None);
        let held = permits.acquire().await;
        let mut cancelled = Box::pin(permits.acquire());
        assert!(within(Duration::ZERO, &mut cancelled).await.is_none());
        let mut second = Box::pin(permits.acquire());
        assert!(within(Duration::ZERO, &mut second).await.is_none());
        drop(cancelled);
        drop(held);
        // The permit is granted to the call that waits, not to a later `try_acquire`.
        assert!(permits.try_acquire().is_none());
        drop(second.await);
        assert!(permits.try_acquire().is_some());
    }

    /// Runs `tasks` tasks that make requests of 20 ms, one after the other, for `seconds`.
    async fn run(permits: &Arc<ConcurrencyLimit>, tasks: usize, seconds: u32, kind: Option<ErrorKind>) {
        let end = Instant::now() + seconds * SECOND;
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..tasks {
            let permits = permits.clone();
            all.spawn(async move {
                while Instant::now() < end {
                    let mut permit = permits.acquire().await;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    permit.transferred(4096, Instant::now());
                    kind.into_iter().for_each(|kind| permits.failed(kind));
                }
            });
        }
        all.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_grows_with_demand_and_shrinks_when_the_store_refuses() {
        let permits = ConcurrencyLimit::new(64, Some(256));
        run(&permits, 20, 3, None).await;
        assert_eq!(permits.limit(), 64);
        run(&permits, 500, 3, None).await;
        assert_eq!(permits.limit(), 256);
        assert!(!permits.was_throttled(10 * SECOND));
        run(&permits, 500, 15, Some(ErrorKind::Throttled)).await;
        assert_eq!((permits.limit(), permits.read_ahead_limit()), (8, 6));
        assert!(permits.was_throttled(10 * SECOND));
        tokio::time::sleep(10 * SECOND).await;
        assert!(!permits.was_throttled(10 * SECOND));
    }

    #[test]
    fn requests_that_back_off_are_counted_up_to_a_bound() {
        let permits = ConcurrencyLimit::new(8, None);
        let backing_off: Vec<_> = (0..5).map(|_| permits.back_off()).collect();
        assert_eq!((permits.backing_off(), permits.read_ahead_limit()), (5, 6));
        let more: Vec<_> = (0..50).map(|_| permits.back_off()).collect();
        assert_eq!(permits.backing_off(), 12);
        drop((backing_off, more));
        assert_eq!(permits.backing_off(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fixed_limit_does_not_change() {
        let permits = ConcurrencyLimit::new(16, None);
        run(&permits, 100, 2, None).await;
        run(&permits, 100, 2, Some(ErrorKind::Throttled)).await;
        assert_eq!((permits.limit(), permits.max(), permits.read_ahead_limit()), (16, 16, 12));
    }
}
