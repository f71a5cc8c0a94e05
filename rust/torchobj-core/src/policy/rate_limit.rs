//! The rate limit in bytes per second, shared by all uploads of an account.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Smaller payloads are not limited: the small objects that commit a checkpoint do not wait for the parts of another one.
const SMALL_BYTES: u64 = 256 << 10;

/// A limit on the bytes sent per second.
#[derive(Debug)]
pub struct RateLimit {
    bytes_per_s: u64,
    /// When all granted bytes are sent. A waiting call holds the lock, and later calls queue for it in order. A call that
    /// is cancelled while it waits uses nothing of the rate.
    free_at: Mutex<Option<Instant>>,
}

impl RateLimit {
    /// A limit of `bytes_per_s`, at least one.
    pub fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1), free_at: Mutex::new(None) }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) async fn acquire(&self, bytes: u64) {
        if bytes < SMALL_BYTES {
            return;
        }
        let mut free_at = self.free_at.lock().await;
        if let Some(free_at) = *free_at {
            sleep_until(free_at).await;
        }
        *free_at = Some(Instant::now() + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::within;

    #[tokio::test(start_paused = true)]
    async fn parts_follow_each_other_at_the_rate() {
        let (rate_limit, began) = (RateLimit::new(1 << 20), Instant::now());
        for _ in 0..5 {
            rate_limit.acquire(1 << 20).await;
        }
        assert_eq!(began.elapsed().as_secs(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn unused_time_is_not_accumulated() {
        let rate_limit = RateLimit::new(1 << 20);
        rate_limit.acquire(1 << 20).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let began = Instant::now();
        rate_limit.acquire(1 << 20).await;
        rate_limit.acquire(1 << 20).await;
        assert_eq!(began.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_calls_use_nothing_of_the_rate_and_small_payloads_do_not_wait() {
        let (rate_limit, began) = (RateLimit::new(1 << 20), Instant::now());
        rate_limit.acquire(1 << 20).await;
        let many = futures_util::future::join_all((0..80).map(|_| rate_limit.acquire(1 << 20)));
        assert!(within(Duration::from_millis(500), many).await.is_none());
        rate_limit.acquire(1).await;
        assert_eq!(began.elapsed().as_millis(), 500);
        rate_limit.acquire(1 << 20).await;
        assert_eq!(began.elapsed().as_secs(), 1);
    }
}
