//! Reads many objects at once. Lanes take the next job each, so that no task is made per object and nothing feeds them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use tokio::task::JoinSet;

use super::fetch::{Landed, Read};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};

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
    let width = jobs.iter().map(|job| job.client.permits()).max().unwrap_or(0).min(jobs.len());
    let jobs = jobs.into_iter().map(|job| Slot { job: Mutex::new(Some(job)), result: OnceLock::new() }).collect();
    let batch = Arc::new(Batch { jobs, next: AtomicUsize::new(0), stop_at_error, failed: AtomicBool::new(false) });
    let mut lanes = JoinSet::new();
    for _ in 0..width {
        lanes.spawn(lane(batch.clone()));
    }
    while let Some(lane) = lanes.join_next().await {
        match lane {
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
