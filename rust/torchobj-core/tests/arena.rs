//! Worker processes that are killed at random times: they read the right bytes, and their memory is reclaimed.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test, also outside its functions")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::io::{FdFlags, fcntl_setfd};
use torchobj_core::arena::{Announcement, Reply, Worker};
use torchobj_core::client::Client;
use torchobj_core::manifest::Manifest;
use torchobj_core::memory::MemoryStore;
use torchobj_core::prefetch::{Object, Prefetcher, Source};
use torchobj_core::runtime::runtime;
use torchobj_core::transfer::Policy;
use torchobj_core::types::PutOptions;

const OBJECTS: u8 = 60;
const BUDGET: u64 = 4 << 20;
const DURATION: Duration = Duration::from_secs(4);
const WORKERS: u64 = 4;
/// The environment variable with the descriptors, the source and the seed of a worker.
const VARIABLE: &str = "TORCHOBJ_TEST_ARENA";

fn size(index: u8) -> usize {
    500 + 1000 * usize::from(index)
}

fn prefetcher() -> (Arc<Prefetcher>, u64) {
    let client = Arc::new(Client::new(Arc::new(MemoryStore::new("arena")), Policy::default()));
    let mut manifest = Manifest::default();
    runtime().block_on(async {
        for index in 0..OBJECTS {
            let key = format!("k{index}");
            let body = Bytes::from(vec![index; size(index)]);
            let version = client.put(&key, body.into(), &PutOptions::default()).await.unwrap();
            manifest.push("memory://m", &key, Some(size(index) as u64), Some(&version));
        }
    });
    let prefetcher = Prefetcher::start(BUDGET).unwrap();
    let source = prefetcher.add_source(Source { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    (prefetcher, source)
}

/// A copy of a descriptor that child processes inherit.
fn inherited(descriptor: BorrowedFd<'_>) -> OwnedFd {
    let copy = descriptor.try_clone_to_owned().unwrap();
    fcntl_setfd(&copy, FdFlags::empty()).unwrap();
    copy
}

/// Runs a worker, adopts the segments that it offers, and kills it after a random time. Returns the number of segments.
fn worker(prefetcher: &Arc<Prefetcher>, source: u64, random: &mut fastrand::Rng) -> usize {
    let (file, eventfd) = (inherited(prefetcher.arena().file()), inherited(prefetcher.arena().eventfd()));
    let arguments = format!("{} {} {source} {}", file.as_raw_fd(), eventfd.as_raw_fd(), random.u64(..));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_worker", "--nocapture"])
        .env(VARIABLE, arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    let lifetime = Duration::from_millis(random.u64(30..400));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(lifetime);
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let mut adopted = 0;
        for line in lines.lines().map_while(Result::ok) {
            let numbers: Vec<u32> = line.split(' ').filter_map(|part| part.parse().ok()).collect();
            // The test harness prints lines as well, and the last line may be truncated.
            let (["offered", .., "."], &[id, generation, index]) =
                (&line.split(' ').collect::<Vec<_>>()[..], &numbers[..])
            else {
                continue;
            };
            let buffer = prefetcher.arena().adopt(id, generation).unwrap().expect("an offered segment stays valid");
            let index = u8::try_from(index).unwrap();
            assert!(buffer.as_slice() == vec![!index; size(index)], "object {index} has other bytes");
            adopted += 1;
        }
        adopted
    })
}

#[test]
fn killed_workers_leak_no_memory_and_cause_no_wrong_bytes() {
    let (prefetcher, source) = prefetcher();
    let end = Instant::now() + DURATION;
    let (offered, killed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for seed in 0..WORKERS {
            let (prefetcher, offered, killed) = (&prefetcher, &offered, &killed);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                while Instant::now() < end {
                    offered.fetch_add(worker(prefetcher, source, &mut random), Ordering::Relaxed);
                    killed.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(WORKERS);
            while Instant::now() < end {
                let iterator = prefetcher.new_iterator();
                for _ in 0..random.u8(1..20) {
                    let order = (0..20).map(|_| Object { source, index: random.u64(0..OBJECTS.into()) });
                    prefetcher.announce(iterator, &order.collect::<Vec<_>>());
                    std::thread::sleep(Duration::from_millis(random.u64(0..5)));
                }
                prefetcher.cancel(iterator);
            }
        });
    });
    let deadline = Instant::now() + Duration::from_secs(8);
    while prefetcher.stats().memory.used > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let stats = prefetcher.stats();
    assert_eq!((stats.memory.used, stats.memory.granted, stats.in_flight, stats.announced), (0, 0, 0, 0));
    let (offered, killed) = (offered.into_inner(), killed.into_inner());
    assert!(offered > 100 && killed > 10, "{offered} segments were offered by {killed} workers");
}

/// The worker process of the test above; does nothing without its variable.
#[test]
fn one_worker() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let numbers: Vec<u64> = arguments.split(' ').map(|number| number.parse().unwrap()).collect();
    let [file, eventfd, source, seed] = numbers[..] else { panic!("{arguments}") };
    let [file, eventfd] = [file, eventfd].map(|number| i32::try_from(number).unwrap());
    let [file, eventfd] = Worker::received(file, eventfd);
    let worker = Arc::new(Worker::attach(file, eventfd).unwrap());
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kept = Vec::new();
    loop {
        let order: Vec<u64> = (0..random.usize(1..32)).map(|_| random.u64(0..OBJECTS.into())).collect();
        let replies = worker.request(source, &order, Announcement::default(), || Ok::<(), ()>(())).unwrap();
        for (index, reply) in order.iter().zip(replies) {
            let Reply::Claimed(claim) = reply else { panic!("{reply:?}") };
            let index = u8::try_from(*index).unwrap();
            let mut buffer = claim.buffer();
            assert!(buffer.as_slice() == vec![index; size(index)], "object {index} has other bytes");
            buffer.as_mut_slice().fill(!index);
            match random.u8(..4) {
                0 => kept.push(buffer),
                1 => {
                    let offer = claim.offer().unwrap();
                    let mut out = std::io::stdout().lock();
                    writeln!(out, "offered {} {} {index} .", offer.id, offer.generation).unwrap();
                    out.flush().unwrap();
                }
                _ => {}
            }
        }
        if kept.len() > 20 {
            kept.clear();
        }
    }
}
