//! Asks for an object or a range, and where the answer is late asks a second time, on another connection. Only heads
//! race: the loser is dropped before a byte of a body is read, so that one answer alone ever writes to a destination.
//! When an answer is late, and what that may cost, `transfer` knows.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::Instant;

use crate::client::Client;
use crate::error::{Operation, Result, Retry};
use crate::store::Opened;
use crate::transfer::{Permit, within};
use crate::types::GetRequest;

/// For so long after the store asked for fewer requests none is made twice.
const PAUSE: Duration = Duration::from_secs(10);

impl Client {
    /// One attempt to open what has about `bytes`, with its time limit; and when it was answered. The caller holds a
    /// permit.
    pub(super) async fn open(&self, request: GetRequest<'_>, bytes: u64) -> Result<(Box<dyn Opened>, Instant)> {
        let began = Instant::now();
        let (key, limit) = (request.key, self.policy().first_byte_timeout);
        let late = self.lateness().limit(bytes).filter(|late| self.policy().hedge && *late < limit);
        let mut first = pin!(self.store().open(request.clone()));
        let mut opened = within(late.unwrap_or(limit), &mut first).await;
        if let (None, Some(late)) = (&opened, late) {
            opened = within(limit - late, self.open_again(first, request, late)).await;
        }
        let opened = opened.unwrap_or_else(|| {
            Err(self.silence(Operation::Get, key, &format!("no answer within {} s", limit.as_secs_f64())))
        })?;
        let answered = Instant::now();
        let took = answered - began;
        self.lateness().answered(bytes, took);
        self.metrics().first_byte.add(took);
        Ok((opened, answered))
    }

    /// Races `first`, which is late, with a second request; as soon as one can be made.
    async fn open_again(
        &self,
        mut first: Pin<&mut (impl Future<Output = Result<Box<dyn Opened>>> + Send)>,
        request: GetRequest<'_>,
        late: Duration,
    ) -> Result<Box<dyn Opened>> {
        let _permit = loop {
            if let Some(permit) = self.leave_to_hedge() {
                break permit;
            }
            if let Some(opened) = within(late, &mut first).await {
                return opened;
            }
        };
        let second = pin!(self.store().open(request));
        match select(first, second).await {
            Either::Left((opened, second)) => match self.or_wait(opened) {
                Ok(opened) => opened,
                // One failure of the two is told.
                Err(error) => second.await.inspect(|_| self.metrics().hedge_won()).map_err(|_| error),
            },
            Either::Right((opened, first)) => match self.or_wait(opened) {
                Ok(opened) => opened.inspect(|_| self.metrics().hedge_won()),
                Err(_) => first.await,
            },
        }
    }

    /// What ends a race, or the failure that the other one may still mend.
    fn or_wait(&self, opened: Result<Box<dyn Opened>>) -> Result<Result<Box<dyn Opened>>> {
        match opened {
            Err(error) if error.kind().retry() != Retry::Never => {
                self.permits().failed(error.kind());
                self.metrics().failed(error.kind());
                Err(error)
            }
            ended => Ok(ended),
        }
    }

    /// A permit for a second request, if one is free, was earned, and the store can bear it.
    fn leave_to_hedge(&self) -> Option<Permit> {
        let permits = self.permits();
        if permits.was_throttled(PAUSE) || !self.lateness().spend() {
            return None;
        }
        let permit = permits.try_acquire();
        match permit {
            Some(_) => self.metrics().hedged(),
            None => self.lateness().put_back(),
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
    use crate::memory::MemoryStore;
    use crate::read::{Job, Landed, Read, get_many};
    use crate::transfer::Policy;
    use crate::types::PutOptions;
    use crate::wrap::{Fault, FaultyStore};

    const BODY: &[u8] = b"twenty bytes of body";
    const MS: Duration = Duration::from_millis(1);

    struct Bench {
        client: Arc<Client>,
        faulty: Arc<FaultyStore>,
        /// What `faulty` hands on to.
        beneath: Arc<FaultyStore>,
    }

    impl Bench {
        /// A client that has read `reads` times, each at once.
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

        async fn read(&self) -> Result<Landed> {
            self.client.get(Read { size: Some(BODY.len() as u64), ..Read::whole("k") }).await
        }

        /// The next reads are late by so much, and what is asked for a second time is not.
        fn late(&self, by: Duration) {
            self.faulty.script(Operation::Get, [Fault::Late(by), Fault::Late(Duration::ZERO)]);
        }

        /// Hedges, and those that won.
        fn hedges(&self) -> (u64, u64) {
            let measured = self.client.metrics().measured();
            (measured.hedges, measured.hedges_won)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_is_overtaken_by_a_second_and_the_bytes_are_right() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.late(500 * MS);
        let began = Instant::now();
        let landed = bench.read().await.unwrap();
        assert!(began.elapsed() < 20 * MS, "{:?}", began.elapsed());
        assert!(landed.buffer.as_slice() == BODY);
        assert_eq!(bench.hedges(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn ranges_are_asked_for_again_too() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.late(500 * MS);
        let range = Some(crate::types::ByteRange::Bounded(7..12));
        let landed = bench.client.get(Read { range, ..Read::whole("k") }).await.unwrap();
        assert!(landed.buffer.as_slice() == b"bytes");
        assert_eq!(bench.hedges(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_answer_that_comes_after_all_wins() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.faulty.script(Operation::Get, [Fault::Late(15 * MS), Fault::Late(500 * MS)]);
        let began = Instant::now();
        assert!(bench.read().await.unwrap().buffer.as_slice() == BODY);
        assert!(began.elapsed() < 20 * MS);
        assert_eq!(bench.hedges(), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_the_two_may_fail() {
        let bench = Bench::new(Policy { max_attempts: 1, ..Policy::default() }, 200).await;
        for (first_by, second_by) in [(200, 0), (20, 200)] {
            bench.faulty.script(Operation::Get, [Fault::Late(first_by * MS), Fault::Late(second_by * MS)]);
            // The one that is there first.
            bench.beneath.script(Operation::Get, [Fault::Fail(ErrorKind::Reset)]);
            assert!(bench.read().await.unwrap().buffer.as_slice() == BODY);
        }
        assert_eq!(bench.hedges(), (2, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn two_that_fail_are_one_error() {
        let bench = Bench::new(Policy { max_attempts: 1, ..Policy::default() }, 200).await;
        bench.late(100 * MS);
        let faults = [Fault::Fail(ErrorKind::Reset), Fault::Fail(ErrorKind::Server)];
        bench.beneath.script(Operation::Get, faults);
        let error = bench.read().await.unwrap_err();
        assert_eq!((error.kind(), error.attempts()), (ErrorKind::Server, 1));
        assert_eq!((bench.hedges(), bench.beneath.pending()), ((1, 0), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_asked_twice_for_ten_seconds_after_a_throttle() {
        let bench = Bench::new(Policy::default(), 200).await;
        bench.faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Throttled)]);
        bench.read().await.unwrap();
        bench.late(500 * MS);
        let began = Instant::now();
        bench.read().await.unwrap();
        assert!(began.elapsed() >= 500 * MS);
        assert_eq!(bench.hedges(), (0, 0));
        bench.read().await.unwrap();
        tokio::time::sleep(PAUSE).await;
        bench.late(500 * MS);
        bench.read().await.unwrap();
        assert_eq!(bench.hedges(), (1, 1));
        assert_eq!(bench.client.metrics().measured().throttled, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_asked_twice_without_a_free_permit_or_where_it_is_turned_off() {
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
    async fn what_is_late_again_and_again_is_asked_for_again_once_in_twenty() {
        let bench = Bench::new(Policy::default(), 200).await;
        // Late against what is usual: 300 of 2200.
        for index in 0..2000 {
            if index % 7 == 0 {
                bench.late(100 * MS);
            }
            bench.read().await.unwrap();
        }
        let (hedges, _) = bench.hedges();
        assert!((20..=110).contains(&hedges), "{hedges}");
    }

    /// Reads `count` times, 60 at once, each request taking what `late` says; the hedges.
    async fn crowd(count: usize, late: impl FnMut() -> Duration) -> u64 {
        let bench = Bench::new(Policy::default(), 0).await;
        let lates: Vec<_> = std::iter::repeat_with(late).map(Fault::Late).take(count + count / 10).collect();
        bench.faulty.script(Operation::Get, lates);
        for _ in 0..count / 60 {
            let job = || Job {
                client: bench.client.clone(),
                read: Read { size: Some(BODY.len() as u64), ..Read::whole("k") },
            };
            let landed = get_many(std::iter::repeat_with(job).take(60).collect(), true).await;
            assert!(landed.into_iter().all(|landed| landed.unwrap().buffer.as_slice() == BODY));
        }
        bench.hedges().0
    }

    #[tokio::test(start_paused = true)]
    async fn a_latency_that_is_the_same_for_all_is_never_late() {
        assert_eq!(crowd(3000, || 20 * MS).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nearly_all_of_a_tail_is_asked_for_again() {
        let (mut random, mut tail) = (fastrand::Rng::with_seed(3), 0);
        let hedges = crowd(12_000, || {
            let slow = random.f64() < 0.01;
            tail += u64::from(slow);
            if slow { random.u32(100..600) * MS } else { 20 * MS }
        });
        let hedges = hedges.await;
        // A tenth of what was drawn is for the second requests, and most of that was not used.
        assert!(hedges * 100 >= tail * 80 && hedges <= tail, "{hedges} of {tail}");
    }
}
