//! The executor: limits, order, errors and aborts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

use super::{Batch, BatchRequest, run_all, try_run_all};
use crate::error::{Error, ErrorKind, Operation, Result};

/// Counters that the requests of a test share.
#[derive(Debug, Default)]
struct Counts {
    started: AtomicUsize,
    running: AtomicUsize,
    max_running: AtomicUsize,
    /// Dropped without completing.
    aborted: AtomicUsize,
}

/// Takes `takes_ms`, then returns its number, fails or panics.
struct Timed {
    counts: Arc<Counts>,
    number: usize,
    takes_ms: u64,
    outcome: Outcome,
}

#[derive(Clone, Copy)]
enum Outcome {
    Success,
    Error,
    Panic,
}

struct Guard {
    counts: Arc<Counts>,
    completed: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.counts.running.fetch_sub(1, Ordering::SeqCst);
        if !self.completed {
            self.counts.aborted.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl BatchRequest for Timed {
    type Output = usize;

    async fn run(self) -> Result<usize> {
        self.counts.started.fetch_add(1, Ordering::SeqCst);
        self.counts.max_running.fetch_max(self.counts.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let mut guard = Guard { counts: self.counts, completed: false };
        sleep(Duration::from_millis(self.takes_ms)).await;
        guard.completed = true;
        match self.outcome {
            Outcome::Success => Ok(self.number),
            Outcome::Error => Err(Error::new(ErrorKind::NotFound, Operation::Get, "", self.number.to_string())),
            Outcome::Panic => panic!("request {}", self.number),
        }
    }
}

fn request(counts: &Arc<Counts>, number: usize, takes_ms: u64, outcome: Outcome) -> Timed {
    Timed { counts: counts.clone(), number, takes_ms, outcome }
}

/// Requests of which the later ones complete first.
fn reversed(counts: &Arc<Counts>, count: usize) -> Vec<Timed> {
    (0..count).map(|number| request(counts, number, (count - number) as u64, Outcome::Success)).collect()
}

#[tokio::test(start_paused = true)]
async fn results_are_in_the_order_of_the_requests() {
    let counts = Arc::default();
    let results = run_all(reversed(&counts, 100), || 7).await;
    assert!(results.into_iter().map(Result::unwrap).eq(0..100));
    assert_eq!(counts.max_running.load(Ordering::SeqCst), 7);
    assert!(run_all(Vec::<Timed>::new(), || 7).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failure_aborts_the_others_or_only_its_own_request() {
    let counts = Arc::default();
    let requests = |outcome| {
        let counts = &counts;
        let all =
            (0..20).map(move |n| request(counts, n, 10 + n as u64, if n == 3 { outcome } else { Outcome::Success }));
        all.collect::<Vec<_>>()
    };
    let results = run_all(requests(Outcome::Error), || 8).await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 19);
    assert_eq!((counts.started.load(Ordering::SeqCst), counts.aborted.load(Ordering::SeqCst)), (20, 0));
    let error = try_run_all(requests(Outcome::Error), || 8).await.unwrap_err();
    assert_eq!((error.kind(), error.to_string().ends_with('3')), (ErrorKind::NotFound, true), "{error}");
    // Three had completed before the failure and were replaced, so seven were running.
    assert_eq!((counts.started.load(Ordering::SeqCst), counts.aborted.load(Ordering::SeqCst)), (20 + 11, 7));
    assert_eq!(counts.running.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_panic_reaches_the_caller() {
    let counts = Arc::default();
    let requests = vec![request(&counts, 0, 5, Outcome::Success), request(&counts, 1, 1, Outcome::Panic)];
    let panic = std::panic::AssertUnwindSafe(try_run_all(requests, || 2)).catch_unwind().await.unwrap_err();
    assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("request 1"));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_aborts_the_requests() {
    let counts = Arc::default();
    let ended = tokio::time::timeout(Duration::from_millis(50), run_all(reversed(&counts, 1000), || 4)).await;
    assert!(ended.is_err());
    while counts.running.load(Ordering::SeqCst) > 0 {
        tokio::task::yield_now().await;
    }
    let started = counts.started.load(Ordering::SeqCst);
    sleep(Duration::from_secs(10)).await;
    assert_eq!((counts.started.load(Ordering::SeqCst), counts.aborted.load(Ordering::SeqCst)), (started, 4));
}

#[tokio::test(start_paused = true)]
async fn a_raised_limit_applies_before_a_request_completes() {
    let (counts, limit) = (Arc::default(), Arc::new(AtomicUsize::new(1)));
    let raised = limit.clone();
    let requests = (0..4).map(|number| request(&counts, number, 10_000, Outcome::Success)).collect();
    let began = Instant::now();
    let all = async {
        run_all(requests, move || raised.load(Ordering::SeqCst)).await;
        began.elapsed()
    };
    let raise = async {
        sleep(Duration::from_secs(1)).await;
        limit.store(4, Ordering::SeqCst);
    };
    let (took, ()) = tokio::join!(all, raise);
    assert!(took < Duration::from_millis(11_200), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn requests_are_added_while_others_run_and_taken_as_they_complete() {
    let counts = Arc::default();
    let batch = Batch::new(|| 2, true);
    assert_eq!(batch.next().await.map(|(number, _)| number), None);
    for request in reversed(&counts, 3) {
        batch.push(request);
    }
    assert_eq!((batch.pending(), batch.limit()), (3, 2));
    let mut taken = Vec::new();
    while let Some((number, result)) = batch.next().await {
        assert_eq!(result.unwrap(), number);
        taken.push(number);
        if number == 0 {
            batch.push(request(&counts, 3, 1, Outcome::Success));
        }
    }
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3]);
    assert_eq!(counts.max_running.load(Ordering::SeqCst), 2);
    batch.push(request(&counts, 4, 10_000, Outcome::Success));
    tokio::task::yield_now().await;
    batch.shutdown().await;
    assert_eq!(counts.aborted.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_request_is_lost_on_many_threads() {
    struct Short(usize);
    impl BatchRequest for Short {
        type Output = usize;

        async fn run(self) -> Result<usize> {
            if self.0.is_multiple_of(3) {
                tokio::task::yield_now().await;
            }
            Ok(self.0)
        }
    }
    for limit in [1, 2, 3, 64] {
        for count in [1, 2, 3, 100, 2000] {
            let outputs = try_run_all((0..count).map(Short).collect(), move || limit).await.unwrap();
            assert!(outputs.into_iter().eq(0..count));
        }
    }
}

/// Fails while one of the parts of the other writes, without a point at which it could be aborted.
enum Nested {
    Parts(Arc<AtomicUsize>),
    Failure(Arc<AtomicUsize>),
}

struct Writing(Arc<AtomicUsize>);

impl BatchRequest for Writing {
    type Output = ();

    async fn run(self) -> Result<()> {
        for _ in 0..100 {
            self.0.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
            self.0.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

impl BatchRequest for Nested {
    type Output = ();

    async fn run(self) -> Result<()> {
        match self {
            Self::Parts(writes) => try_run_all(vec![Writing(writes)], || 1).await.map(drop),
            Self::Failure(writes) => {
                while writes.load(Ordering::SeqCst) == 0 {
                    tokio::task::yield_now().await;
                }
                Err(Error::new(ErrorKind::NotFound, Operation::Get, "x", "fails"))
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_writes_after_the_error_of_another_request_was_returned() {
    for _ in 0..5 {
        let writes = Arc::new(AtomicUsize::new(0));
        let requests = vec![Nested::Parts(writes.clone()), Nested::Failure(writes.clone())];
        assert_eq!(try_run_all(requests, || 2).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(Arc::strong_count(&writes), 1, "a request still exists");
    }
}
