//! Reads segments of objects straight into the memory that they belong to, all in parallel. Which requests that takes
//! `coalesce` says, where the bytes of each go `strips`, and how one is made, and goes on after a failure, `fetch`.

use std::ops::Range;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::coalesce::{self, Part};
use super::plan;
use super::response::Expected;
use super::strips::{Room, Strips};
use crate::buffer::{Dest, Landing, Memory};
use crate::client::Client;
use crate::crc32::Crc32;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::{ByteRange, Version};

/// From here on memory is asked for in huge pages: at least one of them has room in it, wherever it begins.
const HUGE_BYTES: usize = 4 << 20;

/// Bytes that are wanted of an object.
#[derive(Debug)]
pub struct Segment {
    /// Where they begin in the object.
    pub offset: u64,
    /// Where they are to land, to its end.
    pub memory: Memory,
}

impl Segment {
    /// Which bytes of the object; `None` for more than any object has.
    fn range(&self) -> Option<Range<u64>> {
        Some(self.offset..self.offset.checked_add(self.memory.len() as u64)?)
    }

    /// Where they are to land, with nothing there yet.
    fn open(self) -> Dest {
        if self.memory.len() >= HUGE_BYTES {
            self.memory.advise_huge_pages();
        }
        Landing::new(self.memory).1
    }
}

/// One object of a [`scatter`].
#[derive(Debug)]
pub struct Scatter {
    /// Where it is.
    pub client: Arc<Client>,
    /// Its key.
    pub key: String,
    /// The version that must answer; `None` for whichever it is, the same for all segments.
    pub version: Option<Version>,
    /// What of it, in any order.
    pub segments: Vec<Segment>,
}

/// What was read of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scattered {
    /// The version that answered.
    pub version: Option<Version>,
    /// Size of the whole object.
    pub size: u64,
    /// The CRC-32 of each segment, in the order they were given; none where they were not wanted.
    pub crc32: Vec<u32>,
}

/// Reads the segments of all `jobs`, as many requests at a time as their clients permit. Results are in the order of the
/// jobs. Dropping the future ends every read.
///
/// # Errors
/// `Range` when a segment reaches behind its object's end, and those of [`Client::get`]: the first failure ends the other
/// reads, and what the memory then holds is unspecified.
pub async fn scatter(jobs: Vec<Scatter>, checksum: bool) -> Result<Vec<Scattered>> {
    let mut tasks = JoinSet::new();
    for (index, job) in jobs.into_iter().enumerate() {
        tasks.spawn(async move { Ok::<_, Error>((index, job.read(checksum).await?)) });
    }
    let mut results = Vec::with_capacity(tasks.len());
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(result) => results.push(result?),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    results.sort_unstable_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

impl Scatter {
    async fn read(self, checksum: bool) -> Result<Scattered> {
        let (client, key) = (self.client.clone(), self.key.clone());
        client.store().check_key(Operation::Get, &key)?;
        let ranges: Option<Vec<_>> = self.segments.iter().map(Segment::range).collect();
        let behind = |message: &str| client.store().error(ErrorKind::Range, Operation::Get, &key, message);
        let ranges = ranges.ok_or_else(|| behind("asked for bytes that no object has"))?;
        let length = ranges.iter().map(|range| range.end - range.start).sum();
        let parts = coalesce::parts(&ranges, plan::part_bytes(client.policy(), length));
        let scattered = if parts.is_empty() { self.look(checksum).await } else { self.receive(parts, checksum).await }?;
        match ranges.iter().find(|range| range.end > scattered.size) {
            Some(range) => Err(behind(&format!("asked for bytes {range:?}, the object has {}", scattered.size))),
            None => Ok(scattered),
        }
    }

    /// Where no byte is wanted.
    async fn look(self, checksum: bool) -> Result<Scattered> {
        let Self { client, key, version, segments } = self;
        let head = client.head(&key).await?;
        if version.is_some() && version != head.version {
            let message = format!("the object changed: it was {version:?}, now it is {:?}", head.version);
            return Err(client.store().error(ErrorKind::Changed, Operation::Get, &key, &message));
        }
        let crc32 = vec![Crc32::default().value(); if checksum { segments.len() } else { 0 }];
        Ok(Scattered { version: head.version, size: head.size, crc32 })
    }

    async fn receive(self, parts: Vec<Part>, checksum: bool) -> Result<Scattered> {
        let Self { client, key, version, segments } = self;
        let mut expected = Expected { size: None, version };
        let mut first = None;
        if expected.version.is_none() {
            // All ask for one version, which the first answer tells.
            let range = parts.first().map(|part| ByteRange::Bounded(part.range()));
            let bytes = plan::asked_bytes(range.as_ref(), None);
            let response = client.open_first(expected.request(&key, range), bytes).await?;
            let opened = &response.opened;
            expected = Expected { size: Some(opened.size()), version: opened.version().cloned() };
            first = Some(response);
        }
        let mut sums = vec![Crc32::default(); if checksum { segments.len() } else { 0 }];
        let url = client.store().url(&key).into();
        let parts = deal(parts, segments, checksum, url);
        let (mut size, version) = (0, expected.version.clone());
        for strips in client.receive_all(key.into(), expected, parts, first).await? {
            size = strips.size();
            strips.into_sums().into_iter().for_each(|(segment, sum)| sums[segment] = sums[segment].then(sum));
        }
        Ok(Scattered { version, size, crc32: sums.into_iter().map(Crc32::value).collect() })
    }
}

/// The range of each part, and what takes its bytes.
fn deal(
    parts: Vec<Part>,
    segments: Vec<Segment>,
    checksum: bool,
    url: Arc<str>,
) -> impl Iterator<Item = (Range<u64>, Strips)> {
    let mut dests: Vec<Dest> = segments.into_iter().map(Segment::open).collect();
    parts.into_iter().map(move |part| {
        let range = part.range();
        let mut at = range.start;
        let rooms = part.pieces.into_iter().map(|piece| {
            let gap_bytes = length(at..piece.range.start);
            at = piece.range.end;
            let dest = dests[piece.segment].split_to(length(piece.range));
            Room { gap_bytes, segment: piece.segment, dest }
        });
        let strips = Strips::new(rooms.collect(), checksum, url.clone());
        (range, strips)
    })
}

fn length(range: Range<u64>) -> usize {
    usize::try_from(range.end - range.start).expect("no more than the memory that was given, and gaps of 1 MiB")
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one segment is a list of one range")]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::memory::MemoryStore;
    use crate::transfer::{Policy, within};
    use crate::types::PutOptions;
    use crate::wrap::{Fault, FaultyStore};

    /// An object, and a store that fails by script.
    struct Bench {
        client: Arc<Client>,
        faulty: Arc<FaultyStore>,
        body: Bytes,
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
            let mut random = fastrand::Rng::with_seed(7);
            Self::new(std::iter::repeat_with(|| random.u8(..)).take(size).collect(), part_bytes).await
        }

        async fn put(&self, body: Bytes) {
            self.client.put("k", body.into(), &PutOptions::default()).await.unwrap();
        }

        fn job(&self, ranges: &[Range<usize>]) -> (Scatter, Vec<Receiver<Vec<u8>>>) {
            let segments = ranges.iter().map(|range| {
                let (back, receiver) = channel();
                (Segment { offset: range.start as u64, memory: Memory::sent_back(range.len(), back) }, receiver)
            });
            let (segments, receivers) = segments.unzip();
            (Scatter { client: self.client.clone(), key: "k".to_owned(), version: None, segments }, receivers)
        }

        /// Reads `ranges`, and holds them against the object.
        async fn read(&self, ranges: &[Range<usize>]) -> Result<Scattered> {
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

        /// How many requests it takes to read `ranges`.
        async fn requests(&self, ranges: &[Range<usize>]) -> usize {
            self.faulty.script(Operation::Get, [Fault::Late(Duration::ZERO); 100]);
            let before = self.faulty.pending();
            self.read(ranges).await.unwrap();
            before - self.faulty.pending()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_segment_has_its_bytes_and_their_checksum_through_all_failures() {
        const SIZE: usize = 3_000_000;
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..60 {
            let bench = Bench::of(SIZE, random.u64(100_000..1_000_000)).await;
            let ranges = std::iter::repeat_with(|| {
                let start = random.usize(..SIZE);
                let most = [1, 100, 70_000, SIZE][random.usize(..4)];
                start..(start + random.usize(..=most)).min(SIZE)
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
    async fn the_checksum_of_a_segment_in_many_parts_is_that_of_the_catalogue() {
        let bench = Bench::new(Bytes::from_static(b"..123456789.."), 4).await;
        let scattered = bench.read(&[2..11, 2..2, 0..1]).await.unwrap();
        assert_eq!(scattered.crc32[..2], [0xcbf4_3926, 0]);
    }

    #[tokio::test]
    async fn a_body_that_broke_goes_on_at_its_byte() {
        let bench = Bench::of(1_000_000, 8 << 20).await;
        bench.faulty.script(Operation::Get, [Fault::CutBody(900_000)]);
        let small = (0..500_000).step_by(1000).map(|at| at..at + 999);
        let ranges: Vec<_> = small.chain([500_000..1_000_000]).collect();
        assert_eq!(bench.requests(&ranges).await, 2);
        assert_eq!(bench.client.metrics().measured().retries, 1);
    }

    #[tokio::test]
    async fn segments_side_by_side_take_one_request_in_any_order() {
        let bench = Bench::of(1_000_000, 8 << 20).await;
        let ranges: Vec<_> = (0..1000).rev().map(|at| at * 1000..(at + 1) * 1000).collect();
        assert_eq!(bench.requests(&ranges).await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_is_replaced_half_way_is_a_change() {
        let bench = Bench::of(300_000, 100_000).await;
        bench.faulty.script(Operation::Get, [Fault::Late(Duration::ZERO), Fault::Late(Duration::from_secs(2))]);
        let replace = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            bench.put(vec![0; 300_000].into()).await;
        };
        let ranges = [0..300_000];
        let (kind, ()) = tokio::join!(bench.kind(&ranges), replace);
        assert_eq!(kind, ErrorKind::Changed);
    }

    #[tokio::test]
    async fn only_the_version_that_was_asked_for_is_read() {
        let bench = Bench::of(1000, 8 << 20).await;
        let version = bench.read(&[0..10]).await.unwrap().version;
        assert!(version.is_some());
        for (replaced, range) in [(false, 0..10), (false, 0..0), (true, 0..10), (true, 0..0)] {
            if replaced {
                bench.put(bench.body.clone()).await;
            }
            let (job, _receivers) = bench.job(&[range]);
            let result = scatter(vec![Scatter { version: version.clone(), ..job }], false).await;
            match replaced {
                true => assert_eq!(result.unwrap_err().kind(), ErrorKind::Changed),
                false => {
                    assert_eq!(result.unwrap()[0], Scattered { version: version.clone(), size: 1000, crc32: vec![] })
                }
            }
        }
    }

    #[tokio::test]
    async fn a_segment_behind_the_end_is_refused() {
        let bench = Bench::of(1000, 8 << 20).await;
        for behind in [990..1001, 1000..1001, 5000..5001, 1001..1001, 1_000_000..1_000_001] {
            assert_eq!(bench.kind(&[0..10, behind.clone()]).await, ErrorKind::Range, "{behind:?}");
            assert_eq!(bench.kind(std::slice::from_ref(&behind)).await, ErrorKind::Range, "{behind:?}");
        }
        assert_eq!(bench.read(&[1000..1000]).await.unwrap().size, 1000);
        let (mut job, _receivers) = bench.job(&[0..10]);
        job.segments[0].offset = u64::MAX;
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
    async fn a_failure_ends_the_reads_of_all_objects_and_no_writer_is_left() {
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
    async fn a_read_that_is_dropped_lets_go_of_its_memory() {
        let bench = Bench::of(300_000, 10_000).await;
        bench.faulty.script(Operation::Get, [Fault::StallBody(5000); 30]);
        let (job, receivers) = bench.job(&[0..300_000]);
        assert!(within(Duration::from_secs(1), scatter(vec![job], true)).await.is_none());
        while receivers[0].try_recv().is_err() {
            tokio::task::yield_now().await;
        }
    }
}
