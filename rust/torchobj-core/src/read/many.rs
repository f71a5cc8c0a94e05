//! Reads many objects concurrently.

use std::sync::Arc;

use super::fetch::{ReadRequest, ReadResult};
use crate::buffer::Memory;
use crate::client::Client;
use crate::engine::{BatchRequest, permitted, run_all, try_run_all};
use crate::error::Result;

/// One object for [`get_many`].
#[derive(Debug)]
pub struct ClientRead {
    /// The store that holds the object.
    pub client: Arc<Client>,
    /// The object and range.
    pub read: ReadRequest,
    /// The memory for its bytes; `None` for new memory.
    pub into: Option<Memory>,
}

impl ClientRead {
    /// A read into new memory.
    pub fn new(client: Arc<Client>, read: ReadRequest) -> Self {
        Self { client, read, into: None }
    }
}

impl BatchRequest for ClientRead {
    type Output = ReadResult;

    async fn run(self) -> Result<ReadResult> {
        let (fetched, ()) = self.client.get_into(self.read, self.into).await?;
        Ok(fetched)
    }
}

/// Reads all `reads` concurrently, within the limits of their clients, also after failures. Results are in the order of
/// the reads. Dropping the future aborts all reads.
pub async fn get_many(reads: Vec<ClientRead>) -> Vec<Result<ReadResult>> {
    let limit = permitted(reads.iter().map(|read| read.client.permits()));
    run_all(reads, limit).await
}

/// Reads all `reads` concurrently, within the limits of their clients. Results are in the order of the reads. Dropping
/// the future aborts all reads.
///
/// # Errors
/// The first error of a read, which aborts the others.
pub async fn try_get_many(reads: Vec<ClientRead>) -> Result<Vec<ReadResult>> {
    let limit = permitted(reads.iter().map(|read| read.client.permits()));
    try_run_all(reads, limit).await
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;
    use std::time::Duration;

    use bytes::Bytes;
    use tokio::time::Instant;

    use super::*;
    use crate::error::{ErrorKind, Operation};
    use crate::faulty_store::{Fault, FaultyStore};
    use crate::memory::MemoryStore;
    use crate::policy::Policy;
    use crate::types::PutOptions;

    const SUCCESS: Fault = Fault::Delay(Duration::from_millis(20));

    /// Time that `count` reads take if each request fails by the next of `faults`.
    async fn time(policy: Policy, count: usize, faults: impl IntoIterator<Item = Fault>) -> Duration {
        let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("many-{}", fastrand::u64(..))))));
        let client = Arc::new(Client::new(faulty.clone(), policy));
        client.put("k", Bytes::from_static(b"body").into(), &PutOptions::default()).await.unwrap();
        faulty.script(Operation::Get, faults);
        let read = || ClientRead::new(client.clone(), ReadRequest { size: Some(4), ..ReadRequest::whole("k") });
        let began = Instant::now();
        let fetched = try_get_many(std::iter::repeat_with(read).take(count).collect()).await;
        assert!(fetched.unwrap().into_iter().all(|fetched| fetched.buffer.as_slice() == b"body"));
        began.elapsed()
    }

    /// A share `share` of faults, drawn uniformly; the other requests succeed.
    fn drawn(share: f64, count: usize) -> Vec<Fault> {
        let kinds = [
            Fault::Fail(ErrorKind::Throttled),
            Fault::Fail(ErrorKind::Server),
            Fault::Fail(ErrorKind::Reset),
            Fault::Fail(ErrorKind::Stale),
            Fault::Fail(ErrorKind::Protocol),
            Fault::CutBody(2),
            Fault::LoseResponse,
            Fault::Delay(Duration::from_secs(600)),
            Fault::StallBody(2),
        ];
        let mut random = fastrand::Rng::with_seed(9);
        let drawn = || if random.f64() < share { kinds[random.usize(..kinds.len())] } else { SUCCESS };
        std::iter::repeat_with(drawn).take(count).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_batch_uses_a_growing_limit() {
        let policy = Policy { max_in_flight_cap: None, ..Policy::default() };
        let fixed = time(policy, 10_000, repeat_n(SUCCESS, 10_000)).await;
        assert!(fixed > Duration::from_millis(3100) && fixed < Duration::from_millis(3300), "{fixed:?}");
        let grown = time(Policy::default(), 10_000, repeat_n(SUCCESS, 10_000)).await;
        assert!(grown < Duration::from_millis(2200), "{grown:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn five_percent_of_faults_cost_no_more_than_their_timeouts() {
        let policy = Policy::default();
        let clean = time(policy.clone(), 4000, repeat_n(SUCCESS, 4000)).await;
        let faulty = time(policy.clone(), 4000, drawn(0.05, 8000)).await;
        let bound = 3 * clean + 2 * policy.first_byte_timeout + 2 * policy.idle_timeout;
        assert!(faulty <= bound, "{faulty:?} against {clean:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_back_off_are_replaced() {
        let policy = Policy { max_in_flight: 8, max_in_flight_cap: None, ..Policy::default() };
        let throttled = [Fault::Fail(ErrorKind::Throttled); 8];
        let took = time(policy, 400, throttled.into_iter().chain(repeat_n(SUCCESS, 400))).await;
        // 400 reads of 20 ms by 8 tasks take a second: the first eight back off for about as long, concurrently with the others.
        assert!(took < Duration::from_millis(1500), "{took:?}");
    }
}
