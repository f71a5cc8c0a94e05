//! How fast may be sent: a rate that all uploads of an account share. Knows nothing of what is sent.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Less than this is sent at once: what commits a checkpoint does not stand behind the parts of another.
const SMALL_BYTES: u64 = 256 << 10;

/// Leave to send so many bytes a second.
#[derive(Debug)]
pub struct Pace {
    bytes_per_s: u64,
    /// When all that had leave so far is sent. Who waits for leave holds it, and the others stand in line; one that
    /// gives up has booked nothing.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// A pace of `bytes_per_s`, at least one.
    pub fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1), free_at: Mutex::new(None) }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) async fn leave(&self, bytes: u64) {
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
    use crate::transfer::within;

    #[tokio::test(start_paused = true)]
    async fn parts_follow_each_other_at_the_rate() {
        let (pace, began) = (Pace::new(1 << 20), Instant::now());
        for _ in 0..5 {
            pace.leave(1 << 20).await;
        }
        assert_eq!(began.elapsed().as_secs(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn time_that_was_not_used_is_not_saved_up() {
        let pace = Pace::new(1 << 20);
        pace.leave(1 << 20).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let began = Instant::now();
        pace.leave(1 << 20).await;
        pace.leave(1 << 20).await;
        assert_eq!(began.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_keeps_no_place_and_what_is_small_needs_none() {
        let (pace, began) = (Pace::new(1 << 20), Instant::now());
        pace.leave(1 << 20).await;
        let many = futures_util::future::join_all((0..80).map(|_| pace.leave(1 << 20)));
        assert!(within(Duration::from_millis(500), many).await.is_none());
        pace.leave(1).await;
        assert_eq!(began.elapsed().as_millis(), 500);
        pace.leave(1 << 20).await;
        assert_eq!(began.elapsed().as_secs(), 1);
    }
}
