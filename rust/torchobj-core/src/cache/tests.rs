//! Reads through a cache: right bytes whatever happens to its files, no requests for what it has, and never too many bytes.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::*;
use crate::buffer::Memory;
use crate::client::Client;
use crate::error::{Operation, Result};
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::read::ReadRequest;
use crate::test_folder::TestFolder;
use crate::types::{ByteRange, PutOptions, Version};

pub(super) const KIB: usize = 1 << 10;

pub(super) fn random_bytes(size: usize, seed: u64) -> Bytes {
    let mut bytes = vec![0; size];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes.into()
}

pub(super) fn config(folder: &TestFolder) -> CacheConfig {
    CacheConfig {
        folder: folder.0.join("cache"),
        max_bytes: 1 << 30,
        min_free_bytes: 0,
        max_object_bytes: 64 << 20,
        ttl: Duration::from_secs(86_400),
        admit: true,
    }
}

/// A cached store, of which requests are counted.
pub(super) struct Bench {
    client: Arc<Client>,
    store: Arc<FaultyStore>,
    cache: Arc<DiskCache>,
    pub(super) config: CacheConfig,
}

impl Bench {
    pub(super) fn new(config: CacheConfig) -> Self {
        Self::over(Arc::new(MemoryStore::new("cached")), "", config)
    }

    pub(super) fn over(memory: Arc<MemoryStore>, identity: &str, config: CacheConfig) -> Self {
        let store = Arc::new(FaultyStore::new(memory).at(identity));
        let cache = Arc::new(DiskCache::open(config.clone()).unwrap().unwrap());
        let cached = CachedStore::new(store.clone(), cache.clone());
        let policy = Policy { part_bytes: 1 << 20, whole_below_bytes: 2 << 20, hedge: false, ..Policy::default() };
        Self { client: Arc::new(Client::new(Arc::new(cached), policy)), store, cache, config }
    }

    pub(super) async fn put(&self, key: &str, body: &Bytes) -> Version {
        self.client.put(key, body.clone().into(), &PutOptions::default()).await.unwrap()
    }

    /// Reads a range, with the size and version of a listing.
    pub(super) async fn get(
        &self,
        key: &str,
        body: &Bytes,
        version: &Version,
        range: Option<ByteRange>,
    ) -> Result<Vec<u8>> {
        let (size, version) = (Some(body.len() as u64), Some(version.clone()));
        let read = ReadRequest { range, size, version, ..ReadRequest::whole(key) };
        Ok(self.client.get(read).await?.buffer.as_slice().to_vec())
    }

    pub(super) async fn whole(&self, key: &str, body: &Bytes, version: &Version) -> u64 {
        let before = self.gets();
        assert!(self.get(key, body, version, None).await.unwrap() == *body, "{key}");
        self.written();
        self.gets() - before
    }

    /// Number of GET requests so far.
    pub(super) fn gets(&self) -> u64 {
        self.client.metrics().snapshot().first_byte.number()
    }

    pub(super) fn values(&self) -> CacheValues {
        let mut values = CacheValues::default();
        self.cache.add_to(&mut values);
        values
    }

    /// Waits until what is queued is written.
    pub(super) fn written(&self) {
        while self.values().cache_pending > 0 {
            std::thread::yield_now();
        }
    }

    pub(super) fn folder(&self) -> CacheFolder {
        CacheFolder::open(&self.config.folder).unwrap()
    }

    /// Waits for the count of a new folder.
    pub(super) fn counted(self) -> Self {
        while self.folder().used_bytes().unwrap().is_none() {
            std::thread::yield_now();
        }
        self
    }

    /// The files of entries.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let folders = self.folder().folders().filter_map(|folder| fs::read_dir(folder).ok());
        let mut files: Vec<_> = folders.flatten().map(|file| file.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Bytes on the disk by `st_blocks`.
    pub(super) fn disk_usage(&self) -> u64 {
        self.files().iter().map(|path| fs::metadata(path).unwrap().blocks() * 512).sum()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_read_sends_no_request_also_in_another_process() {
    let folder = TestFolder::new();
    let memory = Arc::new(MemoryStore::new("cached"));
    let bench = Bench::over(memory.clone(), "e", config(&folder)).counted();
    let sizes = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 110 * KIB, 1 << 20, 5 << 20, (5 << 20) + 7];
    let mut objects = Vec::new();
    for (number, size) in sizes.into_iter().enumerate() {
        let (key, body) = (format!("{number}"), random_bytes(size, number as u64));
        let version = bench.put(&key, &body).await;
        assert!(bench.whole(&key, &body, &version).await >= 1);
        objects.push((key, body, version));
    }
    let values = bench.values();
    assert_eq!((values.cache_damaged, values.cache_dropped), (0, 0));
    for bench in [&bench, &Bench::over(memory.clone(), "e", config(&folder))] {
        for (key, body, version) in &objects {
            assert_eq!(bench.whole(key, body, version).await, 0, "{key}");
        }
        let found = bench.client.metrics().snapshot();
        assert_eq!(found.cache_hit_bytes, sizes.iter().sum::<usize>() as u64);
    }
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(bench.disk_usage()));
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_are_read_from_the_whole_object_and_from_themselves() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(300 * KIB + 5, 3);
    let version = bench.put("whole", &body).await;
    bench.whole("whole", &body, &version).await;
    let other = bench.put("parts", &body).await;
    let mut random = fastrand::Rng::with_seed(5);
    let mut ranges = HashSet::new();
    for round in 0..300 {
        let start = random.usize(..body.len());
        let range = start..(start + random.usize(1..=200 * KIB)).min(body.len());
        ranges.insert(range.clone());
        let asked = || Some(ByteRange::Bounded(range.start as u64..range.end as u64));
        for (key, version) in [("whole", &version), ("parts", &other), ("parts", &other)] {
            assert!(bench.get(key, &body, version, asked()).await.unwrap() == body[range.clone()], "{round} {range:?}");
            bench.written();
        }
    }
    // One of the whole object, and one of each range.
    assert_eq!(bench.gets(), 1 + ranges.len() as u64);
    for suffix in [1, 70_000, 400_000] {
        let read = bench.get("whole", &body, &version, Some(ByteRange::Suffix(suffix))).await.unwrap();
        assert!(read == body[body.len().saturating_sub(suffix as usize)..]);
    }
}

/// Ranges of an object that are read with one request are entries of their own: in the next epoch other ones are neighbours.
#[tokio::test(flavor = "multi_thread")]
async fn ranges_that_were_read_together_are_found_one_by_one_and_beside_others() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(900 * KIB, 3);
    let version = bench.put("shard", &body).await;
    let sample = |number: usize| (number * 9 * KIB) as u64..(number * 9 * KIB + 8 * KIB) as u64;
    let read = async |numbers: &[usize]| {
        let before = bench.gets();
        let ranges = numbers.iter().map(|number| (sample(*number), None::<Memory>)).collect();
        let (size, version) = (Some(body.len() as u64), Some(version.clone()));
        let read = ReadRequest { size, version, ..ReadRequest::whole("shard") };
        for ((result, ()), number) in bench.client.get_ranges(read, ranges).await.unwrap().iter().zip(numbers) {
            let range = sample(*number);
            assert!(result.buffer.as_slice() == &body[range.start as usize..range.end as usize], "{number}");
        }
        bench.written();
        bench.gets() - before
    };
    assert_eq!(read(&[10, 11, 12, 13]).await, 1);
    assert_eq!(bench.files().len(), 4);
    // Alone, in another group, and beside ranges that are not in the cache.
    assert_eq!(read(&[12]).await, 0);
    assert_eq!(read(&[11, 12]).await, 0);
    assert_eq!(read(&[8, 9, 10, 13, 14, 15]).await, 2);
    assert_eq!(read(&[8, 9, 10, 11, 12, 13, 14, 15]).await, 0);
    assert_eq!(bench.files().len(), 8);
    bench.store.script(Operation::Get, [Fault::CutBody(10 * KIB)]);
    assert_eq!(read(&[20, 21, 22]).await, 2);
    assert_eq!(read(&[20, 21, 22]).await, 1);
    assert_eq!(read(&[20, 21, 22]).await, 0);
    assert_eq!(bench.values().cache_damaged, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_without_a_version_of_a_listing_are_not_cached() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(5 << 20, 1);
    let version = bench.put("k", &body).await;
    for _ in 0..2 {
        let read = bench.client.get(ReadRequest::whole("k")).await.unwrap();
        assert!(read.buffer.as_slice() == &body[..] && read.version == Some(version.clone()));
        // A reader of a file names the version of its first chunk afterwards.
        let range = Some(ByteRange::Bounded(5..1000));
        let next = ReadRequest { range, size: Some(read.size), version: read.version, ..ReadRequest::whole("k") };
        assert!(bench.client.get(next).await.unwrap().buffer.as_slice() == &body[5..1000]);
    }
    bench.written();
    assert_eq!(bench.files().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_or_endpoint_is_another_entry() {
    let folder = TestFolder::new();
    let benches = ["one", "two"]
        .map(|identity| Bench::over(Arc::new(MemoryStore::new("cached")), identity, config(&folder)).counted());
    let bodies = [1, 2, 3].map(|seed| random_bytes(1000, seed));
    // Both stores are new: their URLs, versions and lengths are equal.
    let mut versions = Vec::new();
    for (bench, body) in benches.iter().zip(&bodies) {
        versions.push(bench.put("k", body).await);
        bench.whole("k", body, &versions[0]).await;
    }
    assert_eq!(versions[0], versions[1]);
    for (bench, body) in benches.iter().zip(&bodies) {
        assert_eq!(bench.whole("k", body, &versions[0]).await, 0);
    }
    let replaced = benches[0].put("k", &bodies[2]).await;
    assert_eq!(benches[0].whole("k", &bodies[2], &replaced).await, 1);
    // The version of a listing is read although the object was replaced.
    assert_eq!(benches[0].whole("k", &bodies[0], &versions[0]).await, 0);
}

/// Damages a file: cuts it, appends to it, changes a bit, exchanges it with another one, replaces it, or deletes it.
fn damage(path: &PathBuf, other: &PathBuf, random: &mut fastrand::Rng) {
    let length = fs::metadata(path).unwrap().len();
    let file = fs::OpenOptions::new().write(true).read(true).open(path).unwrap();
    match random.u8(..8) {
        0 => file.set_len(random.u64(..length)).unwrap(),
        1 => file.set_len(length + random.u64(1..5000)).unwrap(),
        2 => fs::rename(other, path).unwrap(),
        3 => {
            fs::copy(other, path).unwrap();
        }
        4 => {
            fs::remove_file(path).unwrap();
            symlink("/etc/passwd", path).unwrap();
        }
        5 => fs::remove_file(path).unwrap(),
        6 => {
            let at = random.u64(..length);
            file.write_all_at(&vec![0; (length - at).min(70_000) as usize], at).unwrap();
        }
        _ => {
            let (at, mut byte) = (random.u64(..length), [0]);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << random.u8(..8)], at).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_files_never_change_what_is_read() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let mut random = fastrand::Rng::with_seed(17);
    let mut objects = Vec::new();
    for number in 0..8 {
        let (key, body) = (format!("{number}"), random_bytes(random.usize(1..300 * KIB), number));
        let version = bench.put(&key, &body).await;
        bench.whole(&key, &body, &version).await;
        objects.push((key, body, version));
    }
    for round in 0..60 {
        let files = bench.files();
        let [one, other] = [random.usize(..files.len()), random.usize(..files.len())];
        if one != other {
            damage(&files[one], &files[other], &mut random);
        }
        for (key, body, version) in &objects {
            let start = random.u64(..body.len() as u64);
            let range = start..random.u64(start + 1..=body.len() as u64);
            let [from, to] = [range.start, range.end].map(|at| at as usize);
            let read = bench.get(key, body, version, Some(ByteRange::Bounded(range))).await.unwrap();
            assert!(read == body[from..to], "round {round}");
            bench.whole(key, body, version).await;
        }
    }
    assert_eq!(bench.client.metrics().snapshot().retries, 0);
    assert!(bench.values().cache_damaged > 0);
    // What was damaged is deleted and written again, and the count is not too low.
    for (key, body, version) in &objects {
        assert_eq!(bench.whole(key, body, version).await, 0);
    }
    assert!(bench.folder().used_bytes().unwrap().unwrap() >= bench.disk_usage());
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_the_data_fits_and_stays() {
    let folder = TestFolder::new();
    let body = random_bytes(10 * KIB, 1);
    let page_bytes = 12 * KIB as u64;
    let bench = Bench::new(CacheConfig { max_bytes: 50 * page_bytes + 100, ..config(&folder) }).counted();
    let mut versions = Vec::new();
    for number in 0..100 {
        versions.push(bench.put(&number.to_string(), &body).await);
    }
    let mut order: Vec<_> = (0..100).collect();
    for epoch in 0..4 {
        fastrand::Rng::with_seed(epoch).shuffle(&mut order);
        let before = bench.gets();
        for number in &order {
            bench.whole(&number.to_string(), &body, &versions[*number]).await;
            assert!(bench.disk_usage() <= bench.config.max_bytes);
        }
        assert_eq!(bench.gets() - before, if epoch == 0 { 100 } else { 50 });
    }
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(50 * page_bytes));
    assert_eq!(bench.values().cache_evicted, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_were_not_read_for_the_ttl_make_room_the_oldest_first() {
    let folder = TestFolder::new();
    let body = random_bytes(10 * KIB, 1);
    let bench = Bench::new(CacheConfig { max_bytes: 10 * 12 * KIB as u64, ..config(&folder) }).counted();
    let mut versions = Vec::new();
    for number in 0..11 {
        versions.push(bench.put(&number.to_string(), &body).await);
        if number < 10 {
            bench.whole(&number.to_string(), &body, &versions[number]).await;
        }
    }
    let files = bench.files();
    let set = |path: &PathBuf, age: i64| {
        let now = SystemTime::now();
        let (past, future) = (Duration::from_secs(age.unsigned_abs()), age < 0);
        let time = if future { now + past } else { now - past };
        fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    };
    let day = 86_400;
    [3 * day, 2 * day, 5 * day, day / 2, -9 * day].into_iter().zip(&files).for_each(|(age, path)| set(path, age));
    assert_eq!(bench.whole("10", &body, &versions[10]).await, 1);
    assert_eq!(bench.values().cache_evicted, 1);
    let left = bench.files();
    assert!(!left.contains(&files[2]) && left.len() == 10, "the oldest made room");
    let age = fs::metadata(&files[4]).unwrap().modified().unwrap().elapsed();
    assert!(age.is_ok(), "a time in the future is set to now");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lower_maximum_admits_nothing_and_deletes_only_expired_entries() {
    let folder = TestFolder::new();
    let body = random_bytes(10 * KIB, 1);
    let bench = Bench::new(config(&folder)).counted();
    let mut versions = Vec::new();
    for number in 0..20 {
        versions.push(bench.put(&number.to_string(), &body).await);
        bench.whole(&number.to_string(), &body, &versions[number]).await;
    }
    let lower = CacheConfig { max_bytes: 5 * 12 * KIB as u64, ..config(&folder) };
    let lower = Bench { store: bench.store.clone(), ..Bench::over(Arc::new(MemoryStore::new("cached")), "", lower) };
    let version = lower.put("other", &body).await;
    lower.whole("other", &body, &version).await;
    // Those of the job with the higher maximum stay.
    assert_eq!((lower.files().len(), lower.values().cache_evicted), (20, 0));
    for path in &bench.files()[..18] {
        let day_before = SystemTime::now() - Duration::from_secs(2 * 86_400);
        fs::File::options().write(true).open(path).unwrap().set_modified(day_before).unwrap();
    }
    // Another process: one searches for expired entries once a minute.
    let next =
        Bench { store: bench.store.clone(), ..Bench::over(Arc::new(MemoryStore::new("cached")), "", lower.config) };
    let version = next.put("other", &body).await;
    next.whole("other", &body, &version).await;
    let used = next.folder().used_bytes().unwrap().unwrap();
    assert!(used <= next.config.max_bytes && used == next.disk_usage() && next.values().cache_evicted >= 16, "{used}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_or_not_to_be_admitted_passes_through_and_is_counted() {
    let folder = TestFolder::new();
    for (dropped, config) in [
        (2, CacheConfig { max_bytes: 100, ..config(&folder) }),
        (2, CacheConfig { max_object_bytes: 100, ..config(&folder) }),
        (0, CacheConfig { admit: false, ..config(&folder) }),
        (2, CacheConfig { min_free_bytes: u64::MAX, ..config(&folder) }),
    ] {
        let bench = Bench::new(config).counted();
        let body = random_bytes(1000, 1);
        let version = bench.put("k", &body).await;
        for _ in 0..2 {
            assert_eq!(bench.whole("k", &body, &version).await, 1);
        }
        assert_eq!((bench.files().len(), bench.values().cache_dropped), (0, dropped), "{:?}", bench.config);
    }
    let bench = Bench::new(config(&folder));
    let body = random_bytes(1000, 1);
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let frozen = Bench::new(CacheConfig { admit: false, ..config(&folder) });
    assert_eq!(frozen.whole("k", &body, &version).await, 0);
}

#[test]
fn a_cache_that_admits_nothing_creates_no_folder() {
    let folder = TestFolder::new();
    let frozen = CacheConfig { admit: false, ..config(&folder) };
    assert!(DiskCache::open(frozen.clone()).unwrap().is_none());
    assert!(!frozen.folder.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_entries_make_room_where_the_disk_is_short() {
    let folder = TestFolder::new();
    let body = random_bytes(10 * KIB, 1);
    let bench = Bench::new(config(&folder)).counted();
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let day_before = SystemTime::now() - Duration::from_secs(2 * 86_400);
    fs::File::options().write(true).open(&bench.files()[0]).unwrap().set_modified(day_before).unwrap();
    let short = Bench::new(CacheConfig { min_free_bytes: u64::MAX, ..config(&folder) });
    let version = short.put("l", &body).await;
    assert_eq!(short.whole("l", &body, &version).await, 1);
    assert_eq!((short.files().len(), short.values().cache_evicted), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_body_that_breaks_off_only_the_rest_is_admitted() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(100 * KIB, 1);
    let version = bench.put("k", &body).await;
    bench.store.script(Operation::Get, [Fault::CutBody(70_000)]);
    assert_eq!(bench.whole("k", &body, &version).await, 2);
    let rest = bench.folder().entries().unwrap().next().unwrap().unwrap().object.unwrap();
    let size = body.len() as u64;
    assert_eq!((bench.files().len(), &rest), (1, &("memory://cached/k".to_owned(), 70_000, size, size)));
    assert_eq!(bench.whole("k", &body, &version).await, 1);
    assert_eq!(bench.whole("k", &body, &version).await, 0);
    assert_eq!(bench.files().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_is_removed_or_takes_no_files_ends_the_cache_and_not_the_reads() {
    for removed in [true, false] {
        let folder = TestFolder::new();
        let bench = Bench::new(config(&folder)).counted();
        let body = random_bytes(1000, 1);
        let path = bench.config.folder.clone();
        for number in 0..20 {
            if number == 10 && removed {
                fs::remove_dir_all(&path).unwrap();
            } else if number == 10 {
                // Also root cannot write into a file in place of a folder.
                fs::remove_dir_all(path.join("v1/writing")).unwrap();
                fs::write(path.join("v1/writing"), "").unwrap();
            }
            let version = bench.put(&number.to_string(), &body).await;
            assert_eq!(bench.whole(&number.to_string(), &body, &version).await, 1);
        }
        assert_eq!((bench.values().cache_admitted, bench.values().cache_dropped), (10, 10));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_stopped_with_the_lock_stops_writes_and_no_reads() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(1000, 1);
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let lock = fs::File::open(bench.config.folder.join("v1/usage")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let other =
        Bench { store: bench.store.clone(), ..Bench::over(Arc::new(MemoryStore::new("cached")), "", config(&folder)) };
    assert_eq!(other.whole("k", &body, &version).await, 0);
    let next = other.put("l", &body).await;
    assert_eq!(other.whole("l", &body, &next).await, 1);
    assert_eq!(other.values().cache_dropped, 1);
    // A damaged file stays, and is not read.
    let file = bench.files().remove(0);
    fs::File::options().write(true).open(&file).unwrap().write_all_at(b"damaged", 0).unwrap();
    assert_eq!(bench.whole("k", &body, &version).await, 1);
    assert_eq!(bench.files(), [file]);
    drop(lock);
    assert_eq!(other.whole("l", &body, &next).await, 1);
    assert_eq!(other.whole("l", &body, &next).await, 0);
}
