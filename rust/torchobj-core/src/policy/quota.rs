//! The retry quota: a token bucket shared by the requests of a client, so that an outage does not cause a retry storm.
//!
//! A retry takes a token. A request that succeeds returns the tokens of its retries, and one percent of the bucket is
//! refilled every second. Requests that fail occasionally therefore never empty it, at any request rate, and all requests
//! in flight can be retried through a short outage. Retries stop only if requests fail permanently.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Tokens of a full bucket per permit: enough for eight retries of each request in flight.
const TOKENS_PER_PERMIT: f64 = 20.0;
/// Share of the capacity that is refilled per second.
const REFILL_PER_SECOND: f64 = 0.01;
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// The retries that a client has left.
#[derive(Debug)]
pub struct Quota {
    capacity: f64,
    state: Mutex<QuotaState>,
    /// Whether the store has ever sent a response.
    responded: AtomicBool,
}

#[derive(Debug)]
struct QuotaState {
    tokens: f64,
    refilled_at: Instant,
    warned_at: Option<Instant>,
}

impl Quota {
    /// A full bucket for a client with up to `permits` concurrent requests.
    pub fn new(permits: usize) -> Self {
        let capacity = (permits as f64 * TOKENS_PER_PERMIT).max(100.0);
        let state = QuotaState { tokens: capacity, refilled_at: Instant::now(), warned_at: None };
        Self { capacity, state: Mutex::new(state), responded: AtomicBool::new(false) }
    }

    /// Takes a token for a retry. Returns `false` if the bucket is empty.
    pub fn take(&self) -> bool {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        let now = Instant::now();
        let since: Duration = now.duration_since(state.refilled_at);
        state.refilled_at = now;
        state.tokens = (state.tokens + since.as_secs_f64() * REFILL_PER_SECOND * self.capacity).min(self.capacity);
        if state.tokens < 1.0 {
            return false;
        }
        state.tokens -= 1.0;
        true
    }

    /// Records that the store sent a response of any status.
    pub fn record_response(&self) {
        self.responded.store(true, Ordering::Relaxed);
    }

    /// Returns whether the store has ever sent a response to this client.
    pub fn has_responded(&self) -> bool {
        self.responded.load(Ordering::Relaxed)
    }

    /// Returns whether a warning about failed requests may be logged: once in ten seconds.
    pub fn may_warn(&self) -> bool {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        let due = state.warned_at.is_none_or(|at| at.elapsed() >= WARN_INTERVAL);
        if due {
            state.warned_at = Some(Instant::now());
        }
        due
    }

    /// Returns the tokens that the retries of a successful request took.
    pub fn put_back(&self, tokens: u32) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.tokens = (state.tokens + f64::from(tokens)).min(self.capacity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_empty_bucket_is_refilled() {
        let quota = Quota::new(5);
        assert_eq!((0..200).filter(|_| quota.take()).count(), 100);
        assert!(!quota.take());
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!((0..200).filter(|_| quota.take()).count(), 3);
        quota.put_back(2);
        assert_eq!((0..200).filter(|_| quota.take()).count(), 2);
    }
}
