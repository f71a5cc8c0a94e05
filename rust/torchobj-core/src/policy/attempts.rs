//! Decides whether and when a failed request is retried: by the kind of the error, with full jitter, within a number of
//! attempts, a timeout and a quota.
//!
//! A throttled response (503, 429, or one with `Retry-After`) is no failure: it does not count as an attempt, and its
//! retry takes nothing from the quota. Throttled requests are retried until the retry timeout. With `max_attempts=1`
//! nothing is retried.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{ConcurrencyLimit, Metrics, Policy, Quota};
use crate::error::{Error, ErrorKind, Result, Retry};

/// The backoff before the second attempt is at most twice this. It doubles with each further attempt.
const BASE: Duration = Duration::from_millis(50);
/// The same for throttled requests.
const THROTTLED_BASE: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(20);
/// Replaces the retry timeout for failed connects while the store has sent no response yet: its endpoint is probably wrong.
const FIRST_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Retries that do not count as attempts: after a stale connection, or after the store detected the bucket's region or
/// its clock skew. Each of these happens once or twice.
const FREE_RETRIES: u32 = 4;
/// An invalid response is not requested again after this many in a row that are invalid in the same way.
const SAME_RESPONSES: u32 = 5;
/// After an attempt that received this many bytes, the number of attempts starts at zero.
const PROGRESS_BYTES: usize = 256 << 10;

/// The attempts of one request.
#[derive(Debug)]
pub struct Attempts<'a> {
    policy: &'a Policy,
    quota: &'a Quota,
    /// Failures are recorded in these.
    permits: &'a ConcurrencyLimit,
    metrics: &'a Metrics,
    started: Instant,
    /// No attempt begins later than this after `started`.
    limit: Duration,
    total: u32,
    /// Attempts that count towards `max_attempts`.
    counted: u32,
    free: u32,
    /// Throttled responses since the last progress.
    throttled: u32,
    /// Tokens that the retries took from the quota.
    taken: u32,
    progress_bytes: usize,
    outcome_unknown: bool,
    /// The error of the last response if it was invalid, and the number of such responses in a row.
    invalid: Option<(String, u32)>,
}

impl<'a> Attempts<'a> {
    /// The attempts of a request that is about to begin.
    pub fn new(policy: &'a Policy, quota: &'a Quota, permits: &'a ConcurrencyLimit, metrics: &'a Metrics) -> Self {
        Self {
            policy,
            quota,
            permits,
            metrics,
            started: Instant::now(),
            limit: policy.retry_timeout,
            total: 0,
            counted: 0,
            free: 0,
            throttled: 0,
            taken: 0,
            progress_bytes: 0,
            outcome_unknown: false,
            invalid: None,
        }
    }

    /// Replaces `retry_timeout` by `limit`.
    #[must_use]
    pub(crate) fn ending_after(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Records that the last attempt succeeded.
    pub fn succeeded(&mut self) {
        if !self.quota.has_responded() {
            self.quota.record_response();
        }
        if self.taken > 0 {
            self.quota.put_back(std::mem::take(&mut self.taken));
        }
    }

    /// Records that the last attempt received `bytes` before it failed. The number of attempts restarts after 256 KiB.
    pub fn progressed(&mut self, bytes: usize) {
        self.progress_bytes += bytes;
        if self.progress_bytes >= PROGRESS_BYTES {
            self.progress_bytes = 0;
            self.counted = 0;
            self.throttled = 0;
            self.invalid = None;
            self.started = Instant::now();
        }
    }

    /// Returns whether any failed attempt may have taken effect.
    pub fn outcome_unknown(&self) -> bool {
        self.outcome_unknown
    }

    /// Records that the last attempt failed. Returns after the backoff if the request is to be retried.
    ///
    /// # Errors
    /// `error` with the number of attempts, if the request is not retried.
    pub async fn failed(&mut self, error: Error) -> Result<()> {
        self.total += 1;
        self.permits.failed(error.kind());
        self.metrics.failed(error.operation(), error.kind());
        if error.status().is_some() {
            self.quota.record_response();
        }
        self.outcome_unknown |= error.kind().outcome_unknown();
        let mut kind = if self.repeats(&error) { Retry::Never } else { error.retry() };
        if kind == Retry::Now && self.free >= FREE_RETRIES {
            kind = Retry::Later;
        }
        match kind {
            Retry::Never => return Err(self.last(error)),
            Retry::Now => {
                self.free += 1;
                self.metrics.retried();
                return Ok(());
            }
            Retry::Later | Retry::Throttled => {}
        }
        let throttled = kind == Retry::Throttled || error.retry_after().is_some();
        let wait = if throttled {
            self.throttled += 1;
            // The jitter spreads requests that received the same `Retry-After`. It grows, so that `Retry-After: 0` does not
            // cause a busy loop.
            let base = if error.retry_after().is_some() { BASE } else { THROTTLED_BASE };
            error.retry_after().unwrap_or_default() + backoff(base, self.throttled, &mut fastrand::Rng::new())
        } else {
            self.counted += 1;
            backoff(BASE, self.counted, &mut fastrand::Rng::new())
        };
        let limit = if error.kind() == ErrorKind::Connect && !self.quota.has_responded() {
            FIRST_CONNECT_TIMEOUT.min(self.limit)
        } else {
            self.limit
        };
        let attempts_left = self.counted < self.policy.max_attempts && self.policy.max_attempts > 1;
        if !attempts_left || self.started.elapsed() + wait > limit {
            return Err(self.last(error));
        }
        if !throttled {
            if !self.quota.take() {
                return Err(self.last(error).with_hint("not retried: the retry quota of this client is used up"));
            }
            self.taken += 1;
        }
        let warns = self.counted + self.throttled >= 3 && self.quota.may_warn();
        let level = if warns { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, "retrying in {wait:.1?}: {}", error.with_attempts(self.total, self.started.elapsed()));
        self.metrics.retried();
        let _backing_off = self.permits.back_off();
        sleep(wait).await;
        Ok(())
    }

    /// Records whether a response was invalid. Returns whether the last ones were invalid in the same way.
    fn repeats(&mut self, error: &Error) -> bool {
        if !matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Integrity) {
            self.invalid = None;
            return false;
        }
        let text = error.to_string();
        let earlier = self.invalid.take().filter(|(last, _)| *last == text).map_or(0, |(_, count)| count);
        self.invalid = Some((text, earlier + 1));
        earlier + 1 >= SAME_RESPONSES
    }

    fn last(&self, error: Error) -> Error {
        let error = error.with_attempts(self.total, self.started.elapsed());
        match error.kind() {
            ErrorKind::Throttled => error.with_hint("the store throttles requests: lower max_in_flight"),
            ErrorKind::Connect if !self.quota.has_responded() => error.with_hint("check the endpoint"),
            _ => error,
        }
    }
}

/// Full jitter: a random duration up to the exponential bound. Source: AWS Architecture Blog, "Exponential Backoff And
/// Jitter".
pub(crate) fn backoff(base: Duration, retry: u32, rng: &mut fastrand::Rng) -> Duration {
    let bound = base.saturating_mul(1 << retry.min(16)).min(MAX_BACKOFF);
    bound.mul_f64(rng.f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Operation;

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, Operation::Get, "s3://b/k", "")
    }

    fn attempts<'a>(policy: &'a Policy, quota: &'a Quota) -> Attempts<'a> {
        let permits = &**Box::leak(Box::new(ConcurrencyLimit::new(1, None)));
        Attempts::new(policy, quota, permits, Box::leak(Box::default()))
    }

    async fn attempts_until_error(policy: &Policy, kind: ErrorKind) -> (u32, Duration) {
        let (quota, permits, metrics) = (Quota::new(100), ConcurrencyLimit::new(1, None), Metrics::default());
        let started = Instant::now();
        let mut attempts = Attempts::new(policy, &quota, &permits, &metrics);
        loop {
            if let Err(last) = attempts.failed(error(kind)).await {
                assert_eq!(metrics.snapshot().retries, u64::from(last.attempts()) - 1);
                return (last.attempts(), started.elapsed());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_error_is_retried_up_to_max_attempts() {
        let policy = Policy { max_attempts: 4, ..Policy::default() };
        assert_eq!(attempts_until_error(&policy, ErrorKind::Server).await.0, 4);
        assert_eq!(attempts_until_error(&policy, ErrorKind::NotFound).await.0, 1);
        assert_eq!(attempts_until_error(&policy, ErrorKind::Stale).await.0, 4 + FREE_RETRIES);
    }

    #[tokio::test(start_paused = true)]
    async fn a_permanent_failure_and_the_same_invalid_response_are_not_retried() {
        let (policy, quota) = (Policy::default(), Quota::new(100));
        assert!(attempts(&policy, &quota).failed(error(ErrorKind::Protocol).permanent()).await.is_err());
        let (count, took) = attempts_until_error(&policy, ErrorKind::Protocol).await;
        assert!(count == SAME_RESPONSES && took < Duration::from_secs(2), "{count} {took:?}");
        let mut attempts = attempts(&policy, &quota);
        for number in 1..policy.max_attempts {
            let differs = Error::new(ErrorKind::Protocol, Operation::Get, "m://m/k", format!("{} bytes", number % 2));
            attempts.failed(differs).await.unwrap();
        }
        let last = attempts.failed(error(ErrorKind::Protocol)).await.unwrap_err();
        assert_eq!(last.attempts(), policy.max_attempts);
    }

    #[tokio::test(start_paused = true)]
    async fn throttling_takes_no_attempt_and_no_quota_and_ends_with_the_timeout() {
        let policy = Policy { max_attempts: 3, retry_timeout: Duration::from_secs(60), ..Policy::default() };
        let quota = Quota::new(1);
        while quota.take() {}
        for retry_after in [None, Some(Duration::from_secs(1)), Some(Duration::ZERO)] {
            let (mut attempts, started) = (attempts(&policy, &quota), Instant::now());
            let throttled = || error(ErrorKind::Throttled).with_retry_after(retry_after);
            let last = loop {
                if let Err(last) = attempts.failed(throttled()).await {
                    break last;
                }
            };
            assert!((6..80).contains(&last.attempts()), "{retry_after:?}: {}", last.attempts());
            assert!(started.elapsed() <= Duration::from_secs(60), "{:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_responses_between_failures_take_none_of_their_attempts() {
        let (policy, quota) = (Policy { max_attempts: 3, ..Policy::default() }, Quota::new(100));
        let mut attempts = attempts(&policy, &quota);
        for _ in 0..2 {
            for _ in 0..3 {
                attempts.failed(error(ErrorKind::Throttled)).await.unwrap();
            }
            attempts.failed(error(ErrorKind::Server)).await.unwrap();
        }
        assert!(attempts.failed(error(ErrorKind::Server)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_throttled_request_is_not_retried_with_a_single_attempt() {
        let policy = Policy { max_attempts: 1, ..Policy::default() };
        assert_eq!(attempts_until_error(&policy, ErrorKind::Throttled).await.0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_fails_at_once_if_retry_after_exceeds_the_retry_timeout() {
        let (policy, quota) = (Policy::default(), Quota::new(100));
        let (mut attempts, started) = (attempts(&policy, &quota), Instant::now());
        let throttled = error(ErrorKind::Throttled).with_retry_after(Some(Duration::from_secs(3600)));
        assert!(attempts.failed(throttled).await.is_err());
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_succeed_at_the_third_attempt_never_empty_the_quota() {
        let (policy, quota) = (Policy::default(), Quota::new(1));
        for _ in 0..10_000 {
            let mut attempts = attempts(&policy, &quota);
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
    async fn failed_connects_end_early_while_the_store_has_never_answered() {
        let (policy, quota) = (Policy { max_attempts: 1000, ..Policy::default() }, Quota::new(100));
        for answered in [false, true] {
            if answered {
                quota.record_response();
            }
            let started = Instant::now();
            let mut attempts = attempts(&policy, &quota);
            while attempts.failed(error(ErrorKind::Connect)).await.is_ok() {}
            assert_eq!(started.elapsed() > FIRST_CONNECT_TIMEOUT, answered, "{:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn received_bytes_restart_the_number_of_attempts() {
        let policy = Policy { max_attempts: 3, ..Policy::default() };
        let quota = Quota::new(100);
        let mut attempts = attempts(&policy, &quota);
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
