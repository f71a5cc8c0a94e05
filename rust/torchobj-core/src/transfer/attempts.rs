//! Whether and when a request that failed is tried again: by kind, with full jitter, within a count, a time and a quota.
//!
//! A store that throttles (503, 429), or sends `Retry-After`, has not failed: such an answer counts
//! as no attempt and takes no quota. It is waited out for as long as retries may take. With a single attempt there are
//! no retries at all.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Metrics, Permits, Policy, Quota};
use crate::error::{Error, ErrorKind, Result, Retry};

/// Backoff before the second attempt is up to twice this; it doubles from there.
const BASE: Duration = Duration::from_millis(50);
/// The same while the store throttles.
const THROTTLED_BASE: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(20);
/// How long a store that never answered may refuse connections: more likely it is not there at all.
const NEVER_ANSWERED: Duration = Duration::from_secs(5);
/// Retries that cost no attempt: a stale connection, a learnt region, a learnt clock. Each can happen once or twice.
const FREE_RETRIES: u32 = 4;
/// So many bytes that arrived make an attempt a success that broke, and not a failure.
const PROGRESS_BYTES: usize = 256 << 10;

/// The attempts of one request.
#[derive(Debug)]
pub struct Attempts<'a> {
    policy: &'a Policy,
    quota: &'a Quota,
    /// Who learns of failures.
    told: Option<(&'a Permits, &'a Metrics)>,
    started: Instant,
    /// No attempt begins later than this after `started`.
    limit: Duration,
    total: u32,
    counted: u32,
    free: u32,
    /// Responses since the last progress that throttled: 503, 429, or with `Retry-After`.
    throttled: u32,
    /// What the retries took from the quota.
    taken: u32,
    progress_bytes: usize,
    outcome_unknown: bool,
}

impl<'a> Attempts<'a> {
    /// Before the first attempt.
    pub fn new(policy: &'a Policy, quota: &'a Quota) -> Self {
        Self {
            policy,
            quota,
            told: None,
            started: Instant::now(),
            limit: policy.retry_timeout,
            total: 0,
            counted: 0,
            free: 0,
            throttled: 0,
            taken: 0,
            progress_bytes: 0,
            outcome_unknown: false,
        }
    }

    /// The same, where permits follow the failures, and they are counted.
    #[must_use]
    pub fn telling(self, permits: &'a Permits, metrics: &'a Metrics) -> Self {
        Self { told: Some((permits, metrics)), ..self }
    }

    /// The same, with `limit` in place of `retry_timeout`.
    #[must_use]
    pub(crate) fn ending_after(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// The last attempt succeeded.
    pub fn succeeded(&mut self) {
        if !self.quota.has_answered() {
            self.quota.answered();
        }
        if self.taken > 0 {
            self.quota.put_back(std::mem::take(&mut self.taken));
        }
    }

    /// The last attempt received `bytes` before it broke: enough of them, and the count starts anew.
    pub fn progressed(&mut self, bytes: usize) {
        self.progress_bytes += bytes;
        if self.progress_bytes >= PROGRESS_BYTES {
            self.progress_bytes = 0;
            self.counted = 0;
            self.throttled = 0;
            self.started = Instant::now();
        }
    }

    /// Whether any attempt may have had its effect although it failed.
    pub fn outcome_unknown(&self) -> bool {
        self.outcome_unknown
    }

    /// The last attempt failed. Waits as long as it should and returns, to try again; or says why not.
    ///
    /// # Errors
    /// `error` itself, with the number of attempts, when there shall be no other.
    pub async fn failed(&mut self, error: Error) -> Result<()> {
        self.total += 1;
        if let Some((permits, metrics)) = self.told {
            permits.failed(error.kind());
            metrics.failed(error.kind());
        }
        if error.status().is_some() {
            self.quota.answered();
        }
        self.outcome_unknown |= error.kind().outcome_unknown();
        let mut kind = error.kind().retry();
        if kind == Retry::Now && self.free >= FREE_RETRIES {
            kind = Retry::Later;
        }
        match kind {
            Retry::Never => return Err(self.last(error)),
            Retry::Now => {
                self.free += 1;
                self.retried();
                return Ok(());
            }
            Retry::Later | Retry::Throttled => {}
        }
        let throttled = kind == Retry::Throttled || error.retry_after().is_some();
        let wait = if throttled {
            self.throttled += 1;
            after_throttle(error.retry_after(), self.throttled)
        } else {
            self.counted += 1;
            backoff(BASE, self.counted, &mut fastrand::Rng::new())
        };
        let limit = if error.kind() == ErrorKind::Connect && !self.quota.has_answered() {
            NEVER_ANSWERED.min(self.limit)
        } else {
            self.limit
        };
        let attempts_left = self.counted < self.policy.max_attempts && self.policy.max_attempts > 1;
        if !attempts_left || self.started.elapsed() + wait > limit {
            return Err(self.last(error));
        }
        if !throttled {
            if !self.quota.take() {
                return Err(self.last(error).with_hint("too many requests of this client fail: it stopped retrying"));
            }
            self.taken += 1;
        }
        if self.counted + self.throttled >= 3 && self.quota.may_say() {
            log::warn!("attempt {} failed, next in {wait:.1?}: {error}", self.total);
        } else {
            log::debug!("attempt {} failed, next in {wait:.1?}: {error}", self.total);
        }
        self.retried();
        let _resting = self.told.map(|(permits, _)| permits.rest());
        sleep(wait).await;
        Ok(())
    }

    fn retried(&self) {
        if let Some((_, metrics)) = self.told {
            metrics.retried();
        }
    }

    fn last(&self, error: Error) -> Error {
        let error = error.with_attempts(self.total, self.started.elapsed());
        match error.kind() {
            ErrorKind::Throttled => error.with_hint("the store asks for fewer requests: lower max_in_flight"),
            ErrorKind::Connect if !self.quota.has_answered() => error.with_hint("is this the right endpoint?"),
            _ => error,
        }
    }
}

/// The wait before the `retry`th retry of a request that was throttled: at least what the store asked for. The jitter
/// on top of that keeps requests that were told the same from coming all at once, and grows, so that an answer of
/// `Retry-After: 0` is no reason to ask in a loop.
fn after_throttle(asked: Option<Duration>, retry: u32) -> Duration {
    let rng = &mut fastrand::Rng::new();
    match asked {
        Some(asked) => asked + backoff(BASE, retry, rng),
        None => backoff(THROTTLED_BASE, retry, rng),
    }
}

/// Full jitter: anything up to the exponential bound. Source: AWS Architecture Blog, "Exponential Backoff And Jitter".
pub(crate) fn backoff(base: Duration, retry: u32, rng: &mut fastrand::Rng) -> Duration {
    let bound = base.saturating_mul(1 << retry.min(16)).min(LONGEST);
    bound.mul_f64(rng.f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Operation;

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, Operation::Get, "s3://b/k", "")
    }

    async fn attempts_until_error(policy: &Policy, kind: ErrorKind) -> (u32, Duration) {
        let (quota, permits, metrics) = (Quota::new(100), Permits::new(1, None), Metrics::default());
        let started = Instant::now();
        let mut attempts = Attempts::new(policy, &quota).telling(&permits, &metrics);
        loop {
            if let Err(last) = attempts.failed(error(kind)).await {
                assert_eq!(metrics.measured().retries, u64::from(last.attempts()) - 1);
                return (last.attempts(), started.elapsed());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_of_the_server_is_tried_so_often_and_not_more() {
        let policy = Policy { max_attempts: 4, ..Policy::default() };
        assert_eq!(attempts_until_error(&policy, ErrorKind::Server).await.0, 4);
        assert_eq!(attempts_until_error(&policy, ErrorKind::NotFound).await.0, 1);
        assert_eq!(attempts_until_error(&policy, ErrorKind::Stale).await.0, 4 + FREE_RETRIES);
    }

    #[tokio::test(start_paused = true)]
    async fn throttling_costs_no_attempt_and_no_quota_and_ends_with_the_timeout() {
        let policy = Policy { max_attempts: 3, retry_timeout: Duration::from_secs(60), ..Policy::default() };
        let quota = Quota::new(1);
        while quota.take() {}
        for asked in [None, Some(Duration::from_secs(1)), Some(Duration::ZERO)] {
            let (mut attempts, started) = (Attempts::new(&policy, &quota), Instant::now());
            let throttled = || error(ErrorKind::Throttled).with_retry_after(asked);
            let last = loop {
                if let Err(last) = attempts.failed(throttled()).await {
                    break last;
                }
            };
            assert!((6..80).contains(&last.attempts()), "{asked:?}: {}", last.attempts());
            assert!(started.elapsed() <= Duration::from_secs(60), "{:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_beside_throttling_has_all_its_attempts() {
        let (policy, quota) = (Policy { max_attempts: 3, ..Policy::default() }, Quota::new(100));
        let mut attempts = Attempts::new(&policy, &quota);
        for _ in 0..2 {
            for _ in 0..3 {
                attempts.failed(error(ErrorKind::Throttled)).await.unwrap();
            }
            attempts.failed(error(ErrorKind::Server)).await.unwrap();
        }
        assert!(attempts.failed(error(ErrorKind::Server)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_single_attempt_is_a_single_one_under_throttling_too() {
        let policy = Policy { max_attempts: 1, ..Policy::default() };
        assert_eq!(attempts_until_error(&policy, ErrorKind::Throttled).await.0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_asks_for_more_time_than_there_is_is_given_up_at_once() {
        let (policy, quota) = (Policy::default(), Quota::new(100));
        let (mut attempts, started) = (Attempts::new(&policy, &quota), Instant::now());
        let asked = error(ErrorKind::Throttled).with_retry_after(Some(Duration::from_secs(3600)));
        assert!(attempts.failed(asked).await.is_err());
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_two_of_three_requests_never_empties_the_quota() {
        let (policy, quota) = (Policy::default(), Quota::new(1));
        for _ in 0..10_000 {
            let mut attempts = Attempts::new(&policy, &quota);
            for _ in 0..2 {
                attempts.failed(error(ErrorKind::Server)).await.unwrap();
            }
            attempts.succeeded();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_attempt_begins_after_the_timeout() {
        let policy = Policy { max_attempts: 1000, retry_timeout: Duration::from_secs(60), ..Policy::default() };
        let (_, took) = attempts_until_error(&policy, ErrorKind::Throttled).await;
        assert!(took <= Duration::from_secs(60), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_never_answered_is_given_up_soon() {
        let (policy, quota) = (Policy { max_attempts: 1000, ..Policy::default() }, Quota::new(100));
        for answered in [false, true] {
            if answered {
                quota.answered();
            }
            let started = Instant::now();
            let mut attempts = Attempts::new(&policy, &quota);
            while attempts.failed(error(ErrorKind::Connect)).await.is_ok() {}
            assert_eq!(started.elapsed() > NEVER_ANSWERED, answered, "{:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_arrive_start_the_count_anew() {
        let policy = Policy { max_attempts: 3, ..Policy::default() };
        let quota = Quota::new(100);
        let mut attempts = Attempts::new(&policy, &quota);
        for _ in 0..50 {
            attempts.progressed(PROGRESS_BYTES / 2);
            attempts.failed(error(ErrorKind::Reset)).await.unwrap();
        }
    }

    #[test]
    fn the_backoff_doubles_and_is_bounded() {
        let mut rng = fastrand::Rng::with_seed(7);
        for (retry, bound_ms) in [(1, 100), (2, 200), (5, 1600), (30, 20_000)] {
            let bound = Duration::from_millis(bound_ms);
            let waits: Vec<_> = (0..1000).map(|_| backoff(BASE, retry, &mut rng)).collect();
            assert!(waits.iter().all(|wait| *wait <= bound));
            assert!(waits.iter().any(|wait| *wait > bound.mul_f64(0.9)), "{retry}");
        }
    }
}
