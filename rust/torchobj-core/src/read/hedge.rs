//! Opens a read and sends a second request, on another connection, when the response is late. Only response heads race:
//! the loser is dropped before a byte of its body is read, so that one response alone writes to the destination.
//! `policy` decides when a response is late and how many second requests are allowed.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::Instant;

use crate::client::Client;
use crate::error::{Operation, Result, Retry};
use crate::policy::{Permit, within};
use crate::store::GetResult;
use crate::types::GetRequest;

/// Time after a throttled response in which no second request is sent.
const THROTTLE_PAUSE: Duration = Duration::from_secs(10);

impl Client {
    /// One attempt to open a read of about `bytes` bytes, within the time limit. Also returns when the request
    /// was sent and when the response arrived. The caller holds a permit.
    pub(super) async fn open(&self, request: GetRequest<'_>, bytes: u64) -> Result<(Box<dyn GetResult>, [Instant; 2])> {
        let began = Instant::now();
        let (key, limit) = (request.key, self.policy().first_byte_timeout);
        let delay = self.hedge_delay().delay(bytes).filter(|delay| self.policy().hedge && *delay < limit);
        let mut first = pin!(self.store().open(request.clone()));
        let mut response = within(delay.unwrap_or(limit), &mut first).await;
        if let (None, Some(delay)) = (&response, delay) {
            response = within(limit - delay, self.race_second(first, request, delay)).await;
        }
        let response = response.unwrap_or_else(|| {
            Err(self.timed_out(Operation::Get, key, &format!("no response within {} s", limit.as_secs_f64())))
        })?;
        let answered = Instant::now();
        let took = answered - began;
        self.hedge_delay().record(bytes, took);
        self.metrics().first_byte(took);
        Ok((response, [began, answered]))
    }

    /// Races `first`, which is late, with a second request once one is allowed.
    async fn race_second(
        &self,
        mut first: Pin<&mut (impl Future<Output = Result<Box<dyn GetResult>>> + Send)>,
        request: GetRequest<'_>,
        delay: Duration,
    ) -> Result<Box<dyn GetResult>> {
        let _permit = loop {
            if let Some(permit) = self.hedge_permit() {
                break permit;
            }
            if let Some(response) = within(delay, &mut first).await {
                return response;
            }
        };
        let second = pin!(self.store().open(request));
        match select(first, second).await {
            Either::Left((response, second)) => match self.final_or_retryable(response) {
                Ok(response) => response,
                // Both failed: return the first error.
                Err(error) => second.await.inspect(|_| self.metrics().hedge_won()).map_err(|_| error),
            },
            Either::Right((response, first)) => match self.final_or_retryable(response) {
                Ok(response) => response.inspect(|_| self.metrics().hedge_won()),
                Err(_) => first.await,
            },
        }
    }

    /// Returns the result that ends the race, or as an `Err` a retryable failure after which the other request decides.
    fn final_or_retryable(&self, response: Result<Box<dyn GetResult>>) -> Result<Result<Box<dyn GetResult>>> {
        match response {
            Err(error) if error.retry() != Retry::Never => {
                self.permits().failed(error.kind());
                self.metrics().failed(Operation::Get, error.kind());
                Err(error)
            }
            ended => Ok(ended),
        }
    }

    /// A permit for a second request, if one is free, the budget of second requests allows it, and the store was not
    /// throttling recently.
    fn hedge_permit(&self) -> Option<Permit> {
        let permits = self.permits();
        if permits.was_throttled(THROTTLE_PAUSE) || !self.hedge_delay().spend() {
            return None;
        }
        let permit = permits.try_acquire();
        match permit {
            Some(_) => self.metrics().hedged(),
            None => self.hedge_delay().put_back(),
        }
        permit
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::error::ErrorKind;
    use crate::faulty_store::{Fault, FaultyStore};
    use crate::memory::MemoryStore;
    use crate::policy::Policy;
    use crate::read::{ClientRead, ReadRequest, ReadResult, try_get_many};
    use crate::types::PutOptions;

    const BODY: &[u8] = b"twenty bytes of body";
    const MS: Duration = Duration::from_millis(1);

    struct Bench {
        client: Arc<Client>,
        faulty: Arc<FaultyStore>,
        /// The store behind `faulty`.
        beneath: Arc<FaultyStore>,
    }

    impl Bench {
        /// A client that has read `reads` times without delay.
        async fn new(policy: Policy, reads: u32) -> Self {
            let memory = Arc::new(MemoryStore::new(format!("hedge-{}", fastrand::u64(..))));
            let beneath = Arc::new(FaultyStore::new(memory));
            let faulty = Arc::new(FaultyStore::new(beneath.clone()));
            let client = Arc::new(Client::new(faulty.clone(), policy));
            client.put("k", Bytes::from_static(BODY).into(), &PutOptions::default()).await.unwrap();
            let bench = Self { client, faulty, beneath };
            for _ in 0..reads {
                bench.read().await.unwrap();
            }
            bench
        }

        async fn read(&self) -> Result<ReadResult> {
            self.client.get(ReadRequest { size: Some(BODY.len() as u64), ..ReadRequest::whole("k") }).await
        }

        /// Delays the next reads by `by`; second requests are not delayed.
        fn late(&self, by: Duration) {
            self.faulty.script(Operation::Get, [Fault::Delay(by), Fault::Delay(Duration::ZERO)]);
        }

        /// Number of second requests sent, and of those that won.
        fn hedges(&self) -> (u64, u64) {
            let measured = self.client.metrics().snapshot();
            (measured.hedges, measured.hedges_won)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_response_replaces_a_late_one_and_the_bytes_are_right() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.late(500 * MS);
        let began = Instant::now();
        let fetched = bench.read().await.unwrap();
        assert!(began.elapsed() < 20 * MS, "{:?}", began.elapsed());
        assert!(fetched.buffer.as_slice() == BODY);
        assert_eq!(bench.hedges(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn ranges_are_hedged_too() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.late(500 * MS);
        let range = Some(crate::types::ByteRange::Bounded(7..12));
        let fetched = bench.client.get(ReadRequest { range, ..ReadRequest::whole("k") }).await.unwrap();
        assert!(fetched.buffer.as_slice() == b"bytes");
        assert_eq!(bench.hedges(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_response_that_arrives_before_the_second_wins() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.faulty.script(Operation::Get, [Fault::Delay(15 * MS), Fault::Delay(500 * MS)]);
        let began = Instant::now();
        assert!(bench.read().await.unwrap().buffer.as_slice() == BODY);
        assert!(began.elapsed() < 20 * MS);
        assert_eq!(bench.hedges(), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_the_two_may_fail() {
        let bench = Bench::new(Policy { max_attempts: 1, ..Policy::default() }, 200).await;
        for (first_by, second_by) in [(200, 0), (20, 200)] {
            bench.faulty.script(Operation::Get, [Fault::Delay(first_by * MS), Fault::Delay(second_by * MS)]);
            // The first to arrive.
            bench.beneath.script(Operation::Get, [Fault::Fail(ErrorKind::Reset)]);
            assert!(bench.read().await.unwrap().buffer.as_slice() == BODY);
        }
        assert_eq!(bench.hedges(), (2, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn two_failures_are_one_error() {
        let bench = Bench::new(Policy { max_attempts: 1, ..Policy::default() }, 200).await;
        bench.late(100 * MS);
        let faults = [Fault::Fail(ErrorKind::Reset), Fault::Fail(ErrorKind::Server)];
        bench.beneath.script(Operation::Get, faults);
        let error = bench.read().await.unwrap_err();
        assert_eq!((error.kind(), error.attempts()), (ErrorKind::Server, 1));
        assert_eq!((bench.hedges(), bench.beneath.pending()), ((1, 0), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn no_hedge_for_ten_seconds_after_a_throttled_response() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Throttled)]);
        bench.read().await.unwrap();
        bench.late(500 * MS);
        let began = Instant::now();
        bench.read().await.unwrap();
        assert!(began.elapsed() >= 500 * MS);
        assert_eq!(bench.hedges(), (0, 0));
        bench.read().await.unwrap();
        tokio::time::sleep(THROTTLE_PAUSE).await;
        bench.late(500 * MS);
        bench.read().await.unwrap();
        assert_eq!(bench.hedges(), (1, 1));
        assert_eq!(bench.client.metrics().snapshot().throttled, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn no_hedge_without_a_free_permit_or_when_disabled() {
        let alone = Policy { max_in_flight: 1, max_in_flight_cap: None, ..Policy::default() };
        let off = Policy { hedge: false, ..Policy::default() };
        for policy in [alone, off] {
            let bench = Bench::new(policy, 200).await;
            bench.late(500 * MS);
            let began = Instant::now();
            bench.read().await.unwrap();
            assert!(began.elapsed() >= 500 * MS);
            assert_eq!(bench.hedges(), (0, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn repeatedly_late_responses_are_hedged_once_in_twenty() {
        let bench = Bench::new(Policy::default(), 200).await;
        // Late compared with the usual: 300 of 2200.
        for index in 0..2000 {
            if index % 7 == 0 {
                bench.late(100 * MS);
            }
            bench.read().await.unwrap();
        }
        let (hedges, _) = bench.hedges();
        assert!((20..=110).contains(&hedges), "{hedges}");
    }

    /// Reads `count` times, 60 concurrently, with the delays from `late`. Returns the number of second requests.
    async fn hedges_of_concurrent_reads(count: usize, late: impl FnMut() -> Duration) -> u64 {
        let bench = Bench::new(Policy::default(), 0).await;
        let lates: Vec<_> = std::iter::repeat_with(late).map(Fault::Delay).take(count + count / 10).collect();
        bench.faulty.script(Operation::Get, lates);
        for _ in 0..count / 60 {
            let read = || ReadRequest { size: Some(BODY.len() as u64), ..ReadRequest::whole("k") };
            let job = || ClientRead::new(bench.client.clone(), read());
            let fetched = try_get_many(std::iter::repeat_with(job).take(60).collect()).await.unwrap();
            assert!(fetched.into_iter().all(|fetched| fetched.buffer.as_slice() == BODY));
        }
        bench.hedges().0
    }

    #[tokio::test(start_paused = true)]
    async fn a_constant_latency_is_never_hedged() {
        assert_eq!(hedges_of_concurrent_reads(3000, || 20 * MS).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nearly_all_of_a_latency_tail_is_hedged() {
        let (mut random, mut tail) = (fastrand::Rng::with_seed(3), 0);
        let hedges = hedges_of_concurrent_reads(12_000, || {
            let slow = random.f64() < 0.01;
            tail += u64::from(slow);
            if slow { random.u32(100..600) * MS } else { 20 * MS }
        });
        let hedges = hedges.await;
        // A tenth of the delays drawn is for second requests, and most of those were not used.
        assert!(hedges * 100 >= tail * 80 && hedges <= tail, "{hedges} of {tail}");
    }
}
