//! What the requests of a client know of one another: a bucket of retries, so that an outage is not answered by a storm. Knows no store.
//!
//! A retry takes a token. A request that succeeds puts back those of its retries, and every second a hundredth of the
//! bucket returns. So requests that fail now and then never empty it, however many there are, and a short outage of
//! everything in flight is survived; only where requests fail for good is there an end to retrying.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Tokens of a full bucket for each request that may be in flight: eight backoffs of all of them, with room to spare.
const TOKENS_PER_PERMIT: f64 = 20.0;
const RETURNED_PER_SECOND: f64 = 0.01;
const SAY_EVERY: Duration = Duration::from_secs(10);

/// The retries that a client has left.
#[derive(Debug)]
pub struct Quota {
    capacity: f64,
    state: Mutex<State>,
    /// Whether the store ever answered.
    answered: AtomicBool,
}

#[derive(Debug)]
struct State {
    tokens: f64,
    filled_at: Instant,
    said_at: Option<Instant>,
}

impl Quota {
    /// A full bucket for a client with so many permits.
    pub fn new(permits: usize) -> Self {
        let capacity = (permits as f64 * TOKENS_PER_PERMIT).max(100.0);
        let state = State { tokens: capacity, filled_at: Instant::now(), said_at: None };
        Self { capacity, state: Mutex::new(state), answered: AtomicBool::new(false) }
    }

    /// Takes a token for a retry, if there is one.
    pub fn take(&self) -> bool {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        let now = Instant::now();
        let since: Duration = now.duration_since(state.filled_at);
        state.filled_at = now;
        state.tokens = (state.tokens + since.as_secs_f64() * RETURNED_PER_SECOND * self.capacity).min(self.capacity);
        if state.tokens < 1.0 {
            return false;
        }
        state.tokens -= 1.0;
        true
    }

    /// A request got an answer, whatever it said.
    pub fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Whether the store ever answered a request of this client.
    pub fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// Whether it is time to say in the log again that requests fail: once in ten seconds.
    pub fn may_say(&self) -> bool {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        let silent = state.said_at.is_none_or(|at| at.elapsed() >= SAY_EVERY);
        if silent {
            state.said_at = Some(Instant::now());
        }
        silent
    }

    /// Puts back the tokens that the retries of a request took.
    pub fn put_back(&self, tokens: u32) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.tokens = (state.tokens + f64::from(tokens)).min(self.capacity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_empty_bucket_fills_again() {
        let quota = Quota::new(5);
        assert_eq!((0..200).filter(|_| quota.take()).count(), 100);
        assert!(!quota.take());
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!((0..200).filter(|_| quota.take()).count(), 3);
        quota.put_back(2);
        assert_eq!((0..200).filter(|_| quota.take()).count(), 2);
    }
}
