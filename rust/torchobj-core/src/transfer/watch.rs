//! Time limits. Both end a wait on a silent store; neither limits how long a healthy transfer takes.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Runs `future` for at most `limit`; `None` when it was not done by then.
pub async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, future).await.ok()
}

/// Runs `future` for as long as something wakes it at least once in `limit`; `None` after a silence.
///
/// A transfer is woken when its socket has bytes or room, so its silence is the store's. This costs one timer a
/// transfer and no word between the two.
pub async fn idle<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut alarm = pin!(sleep_until(Instant::now() + limit));
    let mut woken_at: Option<Instant> = None;
    std::future::poll_fn(move |context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Some(output));
        }
        if alarm.as_mut().poll(context).is_pending() {
            woken_at = Some(Instant::now());
            return Poll::Pending;
        }
        // The alarm rang: a silence began when the future was last woken.
        let silent_since = woken_at.take().unwrap_or_else(|| alarm.deadline() - limit);
        if Instant::now() >= silent_since + limit {
            return Poll::Ready(None);
        }
        alarm.as_mut().reset(silent_since + limit);
        // A timer that was reset is armed by its next poll only.
        match alarm.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(None),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    async fn ticks(count: u32, every: Duration) -> u32 {
        for _ in 0..count {
            tokio::time::sleep(every).await;
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_transfer_that_goes_on_is_not_ended() {
        assert_eq!(idle(LIMIT, ticks(100, Duration::from_secs(9))).await, Some(100));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silence_ends_the_wait() {
        let started = Instant::now();
        let transfer = async {
            ticks(7, Duration::from_secs(3)).await;
            std::future::pending::<()>().await;
        };
        assert_eq!(idle(LIMIT, transfer).await, None);
        let waited = started.elapsed();
        assert!(waited >= Duration::from_secs(31) && waited < Duration::from_secs(42), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_never_moves_is_ended_after_one_limit() {
        let started = Instant::now();
        assert_eq!(idle(LIMIT, std::future::pending::<()>()).await, None);
        assert_eq!(started.elapsed(), LIMIT);
    }
}
