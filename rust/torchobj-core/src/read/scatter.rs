//! Reads ranges of objects directly into separate memory, in parallel. `coalesce` chooses the requests,
//! `scatter_list` distributes their bytes, and `fetch` runs and resumes each request.

use std::ops::Range;
use std::sync::Arc;

use super::coalesce::{self, CoalescedPart};
use super::plan;
use super::response::Expected;
use super::scatter_list::{FragmentSink, ScatterList};
use crate::buffer::{Dest, Memory, PendingBuffer, ReceivedBytes};
use crate::client::Client;
use crate::crc32::Crc32;
use crate::engine::{BatchRequest, permitted, try_run_all};
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{ByteRange, Version};

/// Memory of at least this size is mapped in huge pages: it contains at least one, wherever it starts.
const HUGE_BYTES: usize = 4 << 20;

/// Opens all of `memory` for writing.
pub(super) fn open(memory: Memory) -> Dest {
    if memory.len() >= HUGE_BYTES {
        memory.advise_huge_pages();
    }
    PendingBuffer::new(memory).1
}

/// A range of an object, and the memory for it.
#[derive(Debug)]
pub struct ScatterRange {
    /// Start of the range in the object.
    pub offset: u64,
    /// Memory to fill completely.
    pub dest: Dest,
}

impl ScatterRange {
    /// The range from `offset` that fills all of `memory`.
    pub fn new(offset: u64, memory: Memory) -> Self {
        Self { offset, dest: open(memory) }
    }

    /// The range in the object; `None` if its end exceeds `u64`.
    fn range(&self) -> Option<Range<u64>> {
        Some(self.offset..self.offset.checked_add(self.dest.len() as u64)?)
    }
}

/// One object of a [`scatter`].
#[derive(Debug)]
pub struct ScatterRead {
    /// The store that holds the object.
    pub client: Arc<Client>,
    /// Its key.
    pub key: String,
    /// The version to read; `None` for the current one, the same for all ranges.
    pub version: Option<Version>,
    /// The ranges, in any order.
    pub ranges: Vec<ScatterRange>,
    /// Counts the bytes of this read that have arrived in their memory, for progress.
    pub arrived: ReceivedBytes,
}

/// The result for one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScatterResult {
    /// The version that was read.
    pub version: Option<Version>,
    /// Size of the whole object.
    pub size: u64,
    /// The CRC-32 of each range, in the order given; empty if not requested.
    pub crc32: Vec<u32>,
}

/// Reads the ranges of all `reads` concurrently, within the limits of their clients. Results are in the order of the
/// reads. Dropping the future aborts all reads.
///
/// # Errors
/// `Range` if a range exceeds its object, and errors of [`Client::get`]. The first failure aborts the other reads;
/// the contents of the memory are unspecified then.
pub async fn scatter(reads: Vec<ScatterRead>, checksum: bool) -> Result<Vec<ScatterResult>> {
    let limit = permitted(reads.iter().map(|read| read.client.permits()));
    try_run_all(reads.into_iter().map(|read| ScatterRequest { read, checksum }).collect(), limit).await
}

struct ScatterRequest {
    read: ScatterRead,
    checksum: bool,
}

impl BatchRequest for ScatterRequest {
    type Output = ScatterResult;

    async fn run(self) -> Result<ScatterResult> {
        self.read.read(self.checksum).await
    }
}

impl ScatterRead {
    async fn read(self, checksum: bool) -> Result<ScatterResult> {
        let (client, key) = (self.client.clone(), self.key.clone());
        client.store().check_key(Operation::Get, &key)?;
        let ranges: Option<Vec<_>> = self.ranges.iter().map(ScatterRange::range).collect();
        let out_of_range = |message: &str| client.store().error(ErrorKind::Range, Operation::Get, &key, message);
        let ranges = ranges.ok_or_else(|| out_of_range("the end of a range exceeds 2^64"))?;
        let length = ranges.iter().map(|range| range.end - range.start).sum();
        let parts = coalesce::parts(&ranges, plan::part_bytes(client.policy(), length));
        let scattered =
            if parts.is_empty() { self.read_empty(checksum).await } else { self.receive(parts, checksum).await }?;
        match ranges.iter().find(|range| range.end > scattered.size) {
            Some(range) => Err(out_of_range(&format!("requested bytes {range:?}, the object has {}", scattered.size))),
            None => Ok(scattered),
        }
    }

    /// The result for empty ranges only: sends a HEAD request.
    async fn read_empty(self, checksum: bool) -> Result<ScatterResult> {
        let Self { client, key, version, ranges, .. } = self;
        let head = client.head(&key).await?;
        if version.is_some() && version != head.version {
            let message = format!("the object changed: it was {version:?}, now it is {:?}", head.version);
            return Err(client.store().error(ErrorKind::Changed, Operation::Get, &key, &message));
        }
        let crc32 = vec![Crc32::default().value(); if checksum { ranges.len() } else { 0 }];
        Ok(ScatterResult { version: head.version, size: head.size, crc32 })
    }

    async fn receive(self, parts: Vec<CoalescedPart>, checksum: bool) -> Result<ScatterResult> {
        let Self { client, key, version, ranges, arrived } = self;
        let mut expected = Expected { size: None, version };
        let mut first = None;
        if expected.version.is_none() {
            // All requests must read one version: that of the first response.
            let range = parts.first().map(|part| ByteRange::Bounded(part.range()));
            let bytes = plan::response_bytes(range.as_ref(), None);
            let response = client.open_first(expected.request(&key, range), bytes).await?;
            expected = expected.after(&*response.result);
            first = Some(response);
        }
        let mut sums = vec![Crc32::default(); if checksum { ranges.len() } else { 0 }];
        let url = client.store().url(&key).into();
        let parts = assign_targets(parts, ranges, checksum, url, arrived);
        let (mut size, version) = (0, expected.version.clone());
        for sink in client.receive_all(key.into(), expected, parts, first, usize::MAX).await? {
            size = sink.size;
            sink.into_sums().into_iter().for_each(|(index, sum)| sums[index] = sums[index].then(sum));
        }
        Ok(ScatterResult { version, size, crc32: sums.into_iter().map(Crc32::value).collect() })
    }
}

/// The range of each part, and the sink for its bytes.
fn assign_targets(
    parts: Vec<CoalescedPart>,
    ranges: Vec<ScatterRange>,
    checksum: bool,
    url: Arc<str>,
    arrived: ReceivedBytes,
) -> impl Iterator<Item = (Range<u64>, ScatterList)> {
    let mut dests: Vec<Dest> = ranges.into_iter().map(|range| range.dest).collect();
    parts.into_iter().map(move |part| {
        let range = part.range();
        let mut at = range.start;
        let targets = part.fragments.into_iter().map(|fragment| {
            let gap_bytes = length(at..fragment.range.start);
            at = fragment.range.end;
            let dest = dests[fragment.index].split_to(length(fragment.range));
            FragmentSink { gap_bytes, index: fragment.index, dest }
        });
        let sink = ScatterList::new(targets.collect(), checksum, url.clone(), arrived.clone());
        (range, sink)
    })
}

fn length(range: Range<u64>) -> usize {
    usize::try_from(range.end - range.start).expect("at most the length of the given memory, and gaps of 1 MiB")
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is a list of one range")]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::faulty_store::{Fault, FaultyStore};
    use crate::memory::MemoryStore;
    use crate::policy::{Policy, within};
    use crate::types::PutOptions;

    /// An object, and a store that fails by script.
    struct Bench {
        client: Arc<Client>,
        faulty: Arc<FaultyStore>,
        body: Bytes,
    }

    fn random_bytes(size: usize) -> Bytes {
        let mut bytes = vec![0; size];
        fastrand::Rng::with_seed(7).fill(&mut bytes);
        bytes.into()
    }

    impl Bench {
        async fn new(body: Bytes, part_bytes: u64) -> Self {
            let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("s-{}", fastrand::u64(..))))));
            let client = Arc::new(Client::new(faulty.clone(), Policy { part_bytes, ..Policy::default() }));
            let bench = Self { client, faulty, body: body.clone() };
            bench.put(body).await;
            bench
        }

        async fn of(size: usize, part_bytes: u64) -> Self {
            Self::new(random_bytes(size), part_bytes).await
        }

        async fn put(&self, body: Bytes) {
            self.client.put("k", body.into(), &PutOptions::default()).await.unwrap();
        }

        fn job(&self, ranges: &[Range<usize>]) -> (ScatterRead, Vec<Receiver<Vec<u8>>>) {
            let ranges = ranges.iter().map(|range| {
                let (back, receiver) = channel();
                (ScatterRange::new(range.start as u64, Memory::sent_back(range.len(), back)), receiver)
            });
            let (ranges, receivers) = ranges.unzip();
            let (client, key, arrived) = (self.client.clone(), "k".to_owned(), ReceivedBytes::default());
            (ScatterRead { client, key, version: None, ranges, arrived }, receivers)
        }

        /// Reads `ranges` and compares them with the object.
        async fn read(&self, ranges: &[Range<usize>]) -> Result<ScatterResult> {
            let (job, receivers) = self.job(ranges);
            let scattered = scatter(vec![job], true).await?.remove(0);
            for ((range, receiver), crc32) in ranges.iter().zip(receivers).zip(&scattered.crc32) {
                let bytes = receiver.try_recv().expect("no writer is left");
                assert!(bytes == self.body[range.clone()], "{range:?}");
                assert_eq!(Crc32::of(&bytes).value(), *crc32, "{range:?}");
            }
            Ok(scattered)
        }

        async fn kind(&self, ranges: &[Range<usize>]) -> ErrorKind {
            self.read(ranges).await.unwrap_err().kind()
        }

        /// Number of requests that a read of `ranges` sends.
        async fn requests(&self, ranges: &[Range<usize>]) -> usize {
            self.faulty.script(Operation::Get, [Fault::Delay(Duration::ZERO); 100]);
            let before = self.faulty.pending();
            self.read(ranges).await.unwrap();
            before - self.faulty.pending()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_range_has_its_bytes_and_their_checksum_through_all_failures() {
        const SIZE: usize = 3_000_000;
        let mut random = fastrand::Rng::with_seed(11);
        let body = random_bytes(SIZE);
        for _ in 0..40 {
            let bench = Bench::new(body.clone(), random.u64(100_000..1_000_000)).await;
            let ranges = std::iter::repeat_with(|| {
                let start = random.usize(..SIZE);
                let max = [1, 100, 70_000, SIZE][random.usize(..4)];
                start..(start + random.usize(..=max)).min(SIZE)
            });
            let ranges: Vec<_> = ranges.take(30).collect();
            let faults = [(); 10].map(|()| match random.u8(..5) {
                0 => Fault::Fail(ErrorKind::Server),
                1 => Fault::WrongRange,
                2 => Fault::StallBody(random.usize(..300_000)),
                _ => Fault::CutBody(random.usize(..300_000)),
            });
            bench.faulty.script(Operation::Get, faults);
            bench.read(&ranges).await.unwrap();
        }
    }

    #[tokio::test]
    async fn the_checksum_of_a_range_in_many_parts_is_the_published_check_value() {
        let bench = Bench::new(Bytes::from_static(b"..123456789.."), 4).await;
        let scattered = bench.read(&[2..11, 2..2, 0..1]).await.unwrap();
        assert_eq!(scattered.crc32[..2], [0xcbf4_3926, 0]);
    }

    #[tokio::test]
    async fn a_broken_body_resumes_at_its_byte() {
        let bench = Bench::of(1_000_000, 8 << 20).await;
        bench.faulty.script(Operation::Get, [Fault::CutBody(900_000)]);
        let small = (0..500_000).step_by(1000).map(|at| at..at + 999);
        let ranges: Vec<_> = small.chain([500_000..1_000_000]).collect();
        assert_eq!(bench.requests(&ranges).await, 2);
        assert_eq!(bench.client.metrics().snapshot().retries, 1);
    }

    #[tokio::test]
    async fn adjacent_ranges_take_one_request_in_any_order() {
        let bench = Bench::of(1_000_000, 8 << 20).await;
        let ranges: Vec<_> = (0..1000).rev().map(|at| at * 1000..(at + 1) * 1000).collect();
        assert_eq!(bench.requests(&ranges).await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_replaced_during_the_read_is_an_error() {
        let bench = Bench::of(300_000, 100_000).await;
        bench.faulty.script(Operation::Get, [Fault::Delay(Duration::ZERO), Fault::Delay(Duration::from_secs(2))]);
        let replace = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            bench.put(vec![0; 300_000].into()).await;
        };
        let ranges = [0..300_000];
        let (kind, ()) = tokio::join!(bench.kind(&ranges), replace);
        assert_eq!(kind, ErrorKind::Changed);
    }

    #[tokio::test]
    async fn only_the_requested_version_is_read() {
        let bench = Bench::of(1000, 8 << 20).await;
        let version = bench.read(&[0..10]).await.unwrap().version;
        assert!(version.is_some());
        for (replaced, range) in [(false, 0..10), (false, 0..0), (true, 0..10), (true, 0..0)] {
            if replaced {
                bench.put(bench.body.clone()).await;
            }
            let (job, _receivers) = bench.job(&[range]);
            let result = scatter(vec![ScatterRead { version: version.clone(), ..job }], false).await;
            match replaced {
                true => assert_eq!(result.unwrap_err().kind(), ErrorKind::Changed),
                false => {
                    assert_eq!(
                        result.unwrap()[0],
                        ScatterResult { version: version.clone(), size: 1000, crc32: vec![] }
                    )
                }
            }
        }
    }

    #[tokio::test]
    async fn a_range_beyond_the_end_is_refused() {
        let bench = Bench::of(1000, 8 << 20).await;
        for out_of_range in [990..1001, 1000..1001, 5000..5001, 1001..1001, 1_000_000..1_000_001] {
            assert_eq!(bench.kind(&[0..10, out_of_range.clone()]).await, ErrorKind::Range, "{out_of_range:?}");
            assert_eq!(bench.kind(std::slice::from_ref(&out_of_range)).await, ErrorKind::Range, "{out_of_range:?}");
        }
        assert_eq!(bench.read(&[1000..1000]).await.unwrap().size, 1000);
        let (mut job, _receivers) = bench.job(&[0..10]);
        job.ranges[0].offset = u64::MAX;
        assert_eq!(scatter(vec![job], false).await.unwrap_err().kind(), ErrorKind::Range);
    }

    #[tokio::test]
    async fn results_are_in_the_order_of_the_jobs() {
        let benches = [Bench::of(300_000, 10_000).await, Bench::of(2, 10_000).await, Bench::of(0, 10_000).await];
        let jobs = benches.iter().map(|bench| bench.job(&[0..bench.body.len()]).0);
        let results = scatter(jobs.collect(), false).await.unwrap();
        assert_eq!(results.iter().map(|result| result.size).collect::<Vec<_>>(), [300_000, 2, 0]);
        assert_eq!(scatter(Vec::new(), true).await.unwrap(), []);
    }

    #[tokio::test]
    async fn a_failure_aborts_the_reads_of_all_objects_and_their_writers() {
        let (failing, stalled) = (Bench::of(1000, 10_000).await, Bench::of(300_000, 10_000).await);
        failing.faulty.script(Operation::Get, [Fault::Fail(ErrorKind::AccessDenied)]);
        stalled.faulty.script(Operation::Get, [Fault::StallBody(5000); 30]);
        let ((one, _back), (two, receivers)) = (failing.job(&[0..10]), stalled.job(&[0..300_000]));
        let error = scatter(vec![two, one], true).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AccessDenied);
        while receivers[0].try_recv().is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_read_frees_its_memory() {
        let bench = Bench::of(300_000, 10_000).await;
        bench.faulty.script(Operation::Get, [Fault::StallBody(5000); 30]);
        let (job, receivers) = bench.job(&[0..300_000]);
        assert!(within(Duration::from_secs(1), scatter(vec![job], true)).await.is_none());
        while receivers[0].try_recv().is_err() {
            tokio::task::yield_now().await;
        }
    }
}
