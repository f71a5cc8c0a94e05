//! How fast may be sent: a rate that all uploads of an account share. Knows nothing of what is sent.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Leave to send so many bytes a second.
#[derive(Debug)]
pub struct Pace {
    bytes_per_s: u64,
    /// When all that had leave so far is sent.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// A pace of `bytes_per_s`, at least one.
    pub fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1), free_at: Mutex::new(None) }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) async fn leave(&self, bytes: u64) {
        let begin = {
            let mut free_at = self.free_at.lock().expect("no holder of this lock panics");
            let begin = free_at.unwrap_or_else(Instant::now).max(Instant::now());
            *free_at = Some(begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64));
            begin
        };
        sleep_until(begin).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
