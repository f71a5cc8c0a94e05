//! Reads many objects at once. Lanes take the next job each, so that no task is made per object and nothing feeds them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::task::JoinSet;

use super::fetch::{Landed, Read};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::transfer::within;

/// How often a batch looks whether more may be read at a time than before.
const WIDEN_EVERY: Duration = Duration::from_millis(100);

/// One object for [`get_many`].
#[derive(Debug)]
pub struct Job {
    /// Where it is.
    pub client: Arc<Client>,
    /// What of it.
    pub read: Read,
}

#[derive(Debug)]
struct Batch {
    jobs: Vec<Slot>,
    next: AtomicUsize,
    stop_at_error: bool,
    failed: AtomicBool,
}

/// A job that a lane takes, and the result that it leaves.
#[derive(Debug)]
struct Slot {
    job: Mutex<Option<Job>>,
    result: OnceLock<Result<Landed>>,
}

/// Reads all `jobs`, as many at a time as their clients permit. Results are in the order of the jobs.
///
/// With `stop_at_error`, the first failure ends the other reads: results that are missing for that reason are `Cancelled`.
/// Dropping the future ends every read.
pub async fn get_many(jobs: Vec<Job>, stop_at_error: bool) -> Vec<Result<Landed>> {
    let mut permits = Vec::new();
    for job in &jobs {
        if !permits.iter().any(|known| Arc::ptr_eq(known, job.client.permits())) {
            permits.push(job.client.permits().clone());
        }
    }
    // A lane whose request waits to be tried again needs no permit: another one takes its place meanwhile.
    let width = || permits.iter().map(|permits| permits.limit() + permits.resting()).max().unwrap_or(0);
    let jobs = jobs.into_iter().map(|job| Slot { job: Mutex::new(Some(job)), result: OnceLock::new() }).collect();
    let batch = Arc::new(Batch { jobs, next: AtomicUsize::new(0), stop_at_error, failed: AtomicBool::new(false) });
    let mut lanes = JoinSet::new();
    for _ in 0..width().min(batch.jobs.len()) {
        lanes.spawn(lane(batch.clone()));
    }
    loop {
        let ended = if batch.next.load(Ordering::Relaxed) < batch.jobs.len() {
            within(WIDEN_EVERY, lanes.join_next()).await
        } else {
            Some(lanes.join_next().await)
        };
        let ended = match ended {
            Some(Some(ended)) => ended,
            Some(None) => break,
            None => {
                (lanes.len()..width()).for_each(|_| drop(lanes.spawn(lane(batch.clone()))));
                continue;
            }
        };
        match ended {
            // The first to end after a failure: whatever the others still wait for, nobody needs it.
            Ok(()) if stop_at_error && batch.failed.load(Ordering::Relaxed) => lanes.shutdown().await,
            Ok(()) => {}
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    drop(lanes);
    let batch = Arc::into_inner(batch).expect("every lane has ended and dropped its share");
    batch.jobs.into_iter().map(Slot::into_result).collect()
}

async fn lane(batch: Arc<Batch>) {
    loop {
        let Some(slot) = batch.jobs.get(batch.next.fetch_add(1, Ordering::Relaxed)) else { return };
        if batch.stop_at_error && batch.failed.load(Ordering::Relaxed) {
            return;
        }
        let job = slot.job.lock().expect("no holder of this lock panics").take();
        let Job { client, read } = job.expect("each index is handed out once");
        let result = client.get(read).await;
        let failed = result.is_err();
        slot.result.set(result).expect("each index is handed out once");
        if failed {
            batch.failed.store(true, Ordering::Relaxed);
            if batch.stop_at_error {
                return;
            }
        }
    }
}

impl Slot {
    fn into_result(self) -> Result<Landed> {
        self.result.into_inner().unwrap_or_else(|| {
            Err(Error::new(ErrorKind::Cancelled, Operation::Get, "", "another read of the batch failed"))
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::time::Instant;

    use super::*;
    use crate::memory::MemoryStore;
    use crate::transfer::Policy;
    use crate::types::PutOptions;
    use crate::wrap::{Fault, FaultyStore};

    const ANSWERED: Fault = Fault::Late(Duration::from_millis(20));

    /// How long `count` reads take where each request in turn meets one of `faults`.
    async fn time(policy: Policy, count: usize, faults: impl IntoIterator<Item = Fault>) -> Duration {
        let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("many-{}", fastrand::u64(..))))));
        let client = Arc::new(Client::new(faulty.clone(), policy));
        client.put("k", Bytes::from_static(b"body").into(), &PutOptions::default()).await.unwrap();
        faulty.script(Operation::Get, faults);
        let job = || Job { client: client.clone(), read: Read { size: Some(4), ..Read::whole("k") } };
        let began = Instant::now();
        let landed = get_many(std::iter::repeat_with(job).take(count).collect(), true).await;
        assert!(landed.into_iter().all(|landed| landed.unwrap().buffer.as_slice() == b"body"));
        began.elapsed()
    }

    /// Faults of which `share` are drawn uniformly from these; the other requests are answered.
    fn drawn(share: f64, count: usize) -> Vec<Fault> {
        let kinds = [
            Fault::Fail(ErrorKind::Throttled),
            Fault::Fail(ErrorKind::Server),
            Fault::Fail(ErrorKind::Reset),
            Fault::Fail(ErrorKind::Stale),
            Fault::Fail(ErrorKind::Protocol),
            Fault::CutBody(2),
            Fault::LoseAnswer,
            Fault::Late(Duration::from_secs(600)),
            Fault::StallBody(2),
        ];
        let mut random = fastrand::Rng::with_seed(9);
        let drawn = || if random.f64() < share { kinds[random.usize(..kinds.len())] } else { ANSWERED };
        std::iter::repeat_with(drawn).take(count).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_batch_widens_as_its_permits_grow() {
        let policy = Policy { max_in_flight_cap: None, ..Policy::default() };
        let fixed = time(policy, 10_000, [ANSWERED; 10_000]).await;
        assert!(fixed > Duration::from_millis(3100) && fixed < Duration::from_millis(3300), "{fixed:?}");
        let grown = time(Policy::default(), 10_000, [ANSWERED; 10_000]).await;
        assert!(grown < Duration::from_millis(2200), "{grown:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn five_faults_in_a_hundred_cost_no_more_than_their_timeouts() {
        let policy = Policy::default();
        let clean = time(policy.clone(), 4000, [ANSWERED; 4000]).await;
        let faulty = time(policy.clone(), 4000, drawn(0.05, 8000)).await;
        let bound = 3 * clean + 2 * policy.first_byte_timeout + 2 * policy.idle_timeout;
        assert!(faulty <= bound, "{faulty:?} against {clean:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn lanes_whose_requests_wait_to_be_tried_again_are_replaced() {
        let policy = Policy { max_in_flight: 8, max_in_flight_cap: None, ..Policy::default() };
        let throttled = [Fault::Fail(ErrorKind::Throttled); 8];
        let took = time(policy, 400, throttled.into_iter().chain([ANSWERED; 400])).await;
        // 400 reads of 20 ms by 8 lanes take a second: the first eight wait about as long, beside the others.
        assert!(took < Duration::from_millis(1500), "{took:?}");
    }
}
