//! Time limits. They end a wait on a silent or a very slow store; none limits how long a healthy transfer takes.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::buffer::Progress;

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
        let woken_at = woken_at.take();
        let now = Instant::now();
        let silent_since = match was_stopped(alarm.deadline(), limit, now) {
            true => now,
            false => woken_at.unwrap_or_else(|| alarm.deadline() - limit),
        };
        if now >= silent_since + limit {
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

/// Whether a timer fired so long after its deadline that the process did not run meanwhile: SIGSTOP, a debugger, a paused
/// virtual machine. That time is no evidence against the store.
fn was_stopped(deadline: Instant, limit: Duration, now: Instant) -> bool {
    now >= deadline + limit / 2
}

/// Why a transfer was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    /// No byte arrived for this long.
    Silent(Duration),
    /// So few bytes arrived in this time.
    Slow(u64, Duration),
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(limit) => write!(f, "received no bytes for {} s", limit.as_secs_f64()),
            Self::Slow(bytes, limit) => write!(f, "received {bytes} bytes in {} s", limit.as_secs_f64()),
        }
    }
}

/// Runs a transfer for as long as it moves: `progress` grows at least once in `limit`, and by `min_bytes_per_s` or more
/// on average over each `limit`. Both measurements restart after the process was stopped. Bytes are counted, not
/// wakeups: a transfer that shares its task with others is woken by theirs too.
pub(crate) async fn moving<T>(
    limit: Duration,
    min_bytes_per_s: u64,
    progress: &Progress,
    transfer: impl Future<Output = T>,
) -> Result<T, Stall> {
    let least = min_bytes_per_s as f64 * limit.as_secs_f64();
    let mut transfer = pin!(transfer);
    let began = Instant::now();
    let mut alarm = pin!(sleep_until(began + limit));
    let (mut seen, mut grew_at) = (progress.bytes(), began);
    let (mut window, mut window_began) = (seen, began);
    std::future::poll_fn(move |context| {
        if let Poll::Ready(output) = transfer.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        let bytes = progress.bytes();
        if bytes != seen {
            (seen, grew_at) = (bytes, Instant::now());
        }
        while alarm.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if was_stopped(alarm.deadline(), limit, now) {
                (grew_at, window, window_began) = (now, bytes, now);
            }
            if now >= grew_at + limit {
                return Poll::Ready(Err(Stall::Silent(limit)));
            }
            if now >= window_began + limit {
                if ((bytes - window) as f64) < least {
                    return Poll::Ready(Err(Stall::Slow(bytes - window, now - window_began)));
                }
                (window, window_began) = (bytes, now);
            }
            alarm.as_mut().reset((grew_at + limit).min(window_began + limit));
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Dest, Landing, Memory};

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

    /// Memory for a transfer, and what counts the bytes that arrive there.
    fn watched(len: usize) -> (Dest, Progress) {
        let (_, mut dest) = Landing::new(Memory::allocate(len).unwrap());
        let progress = Progress::default();
        dest.count_in(&progress);
        (dest, progress)
    }

    async fn drip(dest: &mut Dest, bytes: usize, every: Duration) {
        while dest.remaining() > 0 {
            tokio::time::sleep(every).await;
            dest.fill(&vec![7; bytes]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_is_ended_by_its_own_silence_and_not_kept_alive_by_another() {
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = async {
            dest.fill(b"first");
            std::future::pending::<()>().await;
        };
        // Both are polled by one task: each wakeup of the other polls the first.
        let (stalled, _) = tokio::join!(moving(LIMIT, 0, &progress, transfer), ticks(100, Duration::from_secs(1)));
        assert_eq!(stalled, Err(Stall::Silent(LIMIT)));
        let (mut dest, progress) = watched(1 << 20);
        let transfer = async {
            dest.fill(b"first");
            std::future::pending::<()>().await;
        };
        let busy = ticks(1000, Duration::from_secs(1));
        tokio::select! {
            stalled = moving(LIMIT, 0, &progress, transfer) => assert_eq!(stalled, Err(Stall::Silent(LIMIT))),
            _ = busy => panic!("still waiting after {:?}", started.elapsed()),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_below_the_minimum_rate_is_ended_within_two_limits_and_one_above_it_goes_on() {
        for (bytes, min_bytes_per_s, ended) in [(1, 0, false), (1, 2, true), (999, 1000, true), (1000, 1000, false)] {
            let (mut dest, progress) = watched(100 * bytes);
            let started = Instant::now();
            let result =
                moving(LIMIT, min_bytes_per_s, &progress, drip(&mut dest, bytes, Duration::from_secs(1))).await;
            assert_eq!(result.is_err(), ended, "{bytes} of {min_bytes_per_s}: {result:?}");
            assert!(!ended || started.elapsed() <= 2 * LIMIT, "{:?}", started.elapsed());
        }
    }

    /// Stops the process, as SIGSTOP does: the clock goes on, timers fire late, and nothing is polled meanwhile.
    async fn stop_after(running: Duration) {
        tokio::time::sleep(running).await;
        tokio::time::advance(Duration::from_secs(60)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_the_process_was_stopped_does_not_lower_the_rate() {
        let (mut dest, progress) = watched(100 * 1500);
        let transfer = drip(&mut dest, 1500, Duration::from_secs(1));
        let (result, ()) = tokio::join!(moving(LIMIT, 1000, &progress, transfer), stop_after(LIMIT / 2));
        assert_eq!(result, Ok(()));
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = drip(&mut dest, 1, Duration::from_secs(1));
        let (result, ()) = tokio::join!(moving(LIMIT, 1000, &progress, transfer), stop_after(LIMIT / 2));
        assert!(matches!(result, Err(Stall::Slow(..))), "{result:?}");
        assert!(started.elapsed() <= Duration::from_secs(60) + 2 * LIMIT, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_the_process_was_stopped_is_no_silence() {
        let resumed = Duration::from_secs(66);
        let (mut dest, progress) = watched(5);
        let transfer = drip(&mut dest, 5, resumed);
        let (result, ()) = tokio::join!(moving(LIMIT, 0, &progress, transfer), stop_after(LIMIT / 2));
        assert_eq!(result, Ok(()));
        let (result, ()) = tokio::join!(idle(LIMIT, ticks(1, resumed)), stop_after(LIMIT / 2));
        assert_eq!(result, Some(1));
    }

    #[test]
    fn a_stall_says_how_many_bytes_arrived_in_what_time() {
        assert_eq!(Stall::Slow(20, Duration::from_secs(20)).to_string(), "received 20 bytes in 20 s");
        assert_eq!(Stall::Silent(Duration::from_millis(1500)).to_string(), "received no bytes for 1.5 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_becomes_slow_is_ended_soon_after() {
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = async {
            for _ in 0..50 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                dest.fill(&[7; 4096]);
            }
            drip(&mut dest, 1, Duration::from_secs(1)).await;
        };
        let stall = moving(LIMIT, 1024, &progress, transfer).await.unwrap_err();
        assert!(matches!(stall, Stall::Slow(..)), "{stall:?}");
        assert!(started.elapsed() <= Duration::from_secs(50) + 2 * LIMIT, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_never_moves_is_ended_after_one_limit() {
        let started = Instant::now();
        assert_eq!(idle(LIMIT, std::future::pending::<()>()).await, None);
        assert_eq!(started.elapsed(), LIMIT);
    }
}
