//! Timeouts for requests and bodies: total, idle, and for a minimum rate. No timeout ends a transfer that progresses.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::buffer::ReceivedBytes;

/// Runs `future` for at most `limit`. Returns `None` if it did not complete by then.
pub async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, future).await.ok()
}

/// Runs `future` with an idle timeout. Returns `None` if it was not woken for `limit`.
///
/// The socket of a transfer wakes it when it is readable or writable, so no wakeup means that the store is idle. This
/// costs one timer per transfer.
pub async fn with_idle_timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut timer = pin!(sleep_until(Instant::now() + limit));
    let mut woken_at: Option<Instant> = None;
    std::future::poll_fn(move |context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Some(output));
        }
        if timer.as_mut().poll(context).is_pending() {
            woken_at = Some(Instant::now());
            return Poll::Pending;
        }
        // The timer fired: the future has been idle since it was last woken.
        let woken_at = woken_at.take();
        let now = Instant::now();
        let idle_since = match was_stopped(timer.deadline(), limit, now) {
            true => now,
            false => woken_at.unwrap_or_else(|| timer.deadline() - limit),
        };
        if now >= idle_since + limit {
            return Poll::Ready(None);
        }
        timer.as_mut().reset(idle_since + limit);
        // A timer that was reset is armed by its next poll only.
        match timer.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(None),
        }
    })
    .await
}

/// Returns whether the process was stopped before the timer fired, by SIGSTOP, a debugger or a paused virtual machine: the
/// timer fired long after its deadline. That time does not count against the store.
fn was_stopped(deadline: Instant, limit: Duration, now: Instant) -> bool {
    now >= deadline + limit / 2
}

/// Why a transfer was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    /// No byte was received for this long.
    Silent(Duration),
    /// The number of bytes received in this time was below the minimum rate.
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

/// Runs a transfer until it completes or stalls. `progress` must grow at least once per `limit`, and by `min_bytes_per_s`
/// on average over each `limit`. Both measurements restart after the process was stopped. Bytes are counted and not
/// wakeups, because a transfer that shares its task with others is woken with them.
pub(crate) async fn until_stalled<T>(
    limit: Duration,
    min_bytes_per_s: u64,
    progress: &ReceivedBytes,
    transfer: impl Future<Output = T>,
) -> Result<T, Stall> {
    let min_bytes = min_bytes_per_s as f64 * limit.as_secs_f64();
    let mut transfer = pin!(transfer);
    let began = Instant::now();
    let mut timer = pin!(sleep_until(began + limit));
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
        while timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if was_stopped(timer.deadline(), limit, now) {
                (grew_at, window, window_began) = (now, bytes, now);
            }
            if now >= grew_at + limit {
                return Poll::Ready(Err(Stall::Silent(limit)));
            }
            if now >= window_began + limit {
                if ((bytes - window) as f64) < min_bytes {
                    return Poll::Ready(Err(Stall::Slow(bytes - window, now - window_began)));
                }
                (window, window_began) = (bytes, now);
            }
            timer.as_mut().reset((grew_at + limit).min(window_began + limit));
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Dest, Memory, PendingBuffer};

    const LIMIT: Duration = Duration::from_secs(10);

    async fn ticks(count: u32, every: Duration) -> u32 {
        for _ in 0..count {
            tokio::time::sleep(every).await;
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_transfer_that_progresses_is_not_ended() {
        assert_eq!(with_idle_timeout(LIMIT, ticks(100, Duration::from_secs(9))).await, Some(100));
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_transfer_is_ended() {
        let started = Instant::now();
        let transfer = async {
            ticks(7, Duration::from_secs(3)).await;
            std::future::pending::<()>().await;
        };
        assert_eq!(with_idle_timeout(LIMIT, transfer).await, None);
        let waited = started.elapsed();
        assert!(waited >= Duration::from_secs(31) && waited < Duration::from_secs(42), "{waited:?}");
    }

    /// Memory for a transfer, and a counter of the bytes received into it.
    fn watched(len: usize) -> (Dest, ReceivedBytes) {
        let (_, mut dest) = PendingBuffer::new(Memory::allocate(len).unwrap());
        let progress = ReceivedBytes::default();
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
    async fn wakeups_of_another_transfer_of_the_task_do_not_keep_an_idle_one_alive() {
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = async {
            dest.fill(b"first");
            std::future::pending::<()>().await;
        };
        // One task polls both: each wakeup of the other transfer polls the first.
        let (stalled, _) =
            tokio::join!(until_stalled(LIMIT, 0, &progress, transfer), ticks(100, Duration::from_secs(1)));
        assert_eq!(stalled, Err(Stall::Silent(LIMIT)));
        let (mut dest, progress) = watched(1 << 20);
        let transfer = async {
            dest.fill(b"first");
            std::future::pending::<()>().await;
        };
        let busy = ticks(1000, Duration::from_secs(1));
        tokio::select! {
            stalled = until_stalled(LIMIT, 0, &progress, transfer) => assert_eq!(stalled, Err(Stall::Silent(LIMIT))),
            _ = busy => panic!("still waiting after {:?}", started.elapsed()),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_below_the_minimum_rate_is_ended_within_two_limits_and_one_above_it_is_not() {
        for (bytes, min_bytes_per_s, ended) in [(1, 0, false), (1, 2, true), (999, 1000, true), (1000, 1000, false)] {
            let (mut dest, progress) = watched(100 * bytes);
            let started = Instant::now();
            let result =
                until_stalled(LIMIT, min_bytes_per_s, &progress, drip(&mut dest, bytes, Duration::from_secs(1))).await;
            assert_eq!(result.is_err(), ended, "{bytes} of {min_bytes_per_s}: {result:?}");
            assert!(!ended || started.elapsed() <= 2 * LIMIT, "{:?}", started.elapsed());
        }
    }

    /// Stops the process, as SIGSTOP does: the clock advances, timers fire late, and nothing is polled meanwhile.
    async fn stop_after(running: Duration) {
        tokio::time::sleep(running).await;
        tokio::time::advance(Duration::from_secs(60)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_the_process_was_stopped_does_not_lower_the_rate() {
        let (mut dest, progress) = watched(100 * 1500);
        let transfer = drip(&mut dest, 1500, Duration::from_secs(1));
        let (result, ()) = tokio::join!(until_stalled(LIMIT, 1000, &progress, transfer), stop_after(LIMIT / 2));
        assert_eq!(result, Ok(()));
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = drip(&mut dest, 1, Duration::from_secs(1));
        let (result, ()) = tokio::join!(until_stalled(LIMIT, 1000, &progress, transfer), stop_after(LIMIT / 2));
        assert!(matches!(result, Err(Stall::Slow(..))), "{result:?}");
        assert!(started.elapsed() <= Duration::from_secs(60) + 2 * LIMIT, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_the_process_was_stopped_is_not_idle_time() {
        let resumed = Duration::from_secs(66);
        let (mut dest, progress) = watched(5);
        let transfer = drip(&mut dest, 5, resumed);
        let (result, ()) = tokio::join!(until_stalled(LIMIT, 0, &progress, transfer), stop_after(LIMIT / 2));
        assert_eq!(result, Ok(()));
        let (result, ()) = tokio::join!(with_idle_timeout(LIMIT, ticks(1, resumed)), stop_after(LIMIT / 2));
        assert_eq!(result, Some(1));
    }

    #[test]
    fn the_text_of_a_stall_has_the_bytes_and_the_time() {
        assert_eq!(Stall::Slow(20, Duration::from_secs(20)).to_string(), "received 20 bytes in 20 s");
        assert_eq!(Stall::Silent(Duration::from_millis(1500)).to_string(), "received no bytes for 1.5 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_becomes_slow_is_ended_within_two_limits() {
        let (mut dest, progress) = watched(1 << 20);
        let started = Instant::now();
        let transfer = async {
            for _ in 0..50 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                dest.fill(&[7; 4096]);
            }
            drip(&mut dest, 1, Duration::from_secs(1)).await;
        };
        let stall = until_stalled(LIMIT, 1024, &progress, transfer).await.unwrap_err();
        assert!(matches!(stall, Stall::Slow(..)), "{stall:?}");
        assert!(started.elapsed() <= Duration::from_secs(50) + 2 * LIMIT, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_that_never_progresses_is_ended_after_one_limit() {
        let started = Instant::now();
        assert_eq!(with_idle_timeout(LIMIT, std::future::pending::<()>()).await, None);
        assert_eq!(started.elapsed(), LIMIT);
    }
}
