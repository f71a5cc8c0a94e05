//! Worker processes that are killed at random moments: they read the right bytes, and their memory is reclaimed.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test, also outside its functions")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::io::{FdFlags, fcntl_setfd};
use torchobj_core::arena::{Announcement, Reply, Worker};
use torchobj_core::client::Client;
use torchobj_core::manifest::Manifest;
use torchobj_core::memory::MemoryStore;
use torchobj_core::policy::Policy;
use torchobj_core::prefetch::{ListedSource, ObjectId, Prefetcher};
use torchobj_core::runtime::runtime;
use torchobj_core::source_key::SourceKey;
use torchobj_core::types::PutOptions;

const OBJECTS: u8 = 60;
const BUDGET: u64 = 4 << 20;
/// Workers that run at once, and the number of each that are killed.
const WORKERS: u64 = 4;
const KILLED: usize = 12;
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
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    (prefetcher, source)
}

/// A copy of a descriptor that child processes inherit.
fn inherited(descriptor: BorrowedFd<'_>) -> OwnedFd {
    let copy = descriptor.try_clone_to_owned().unwrap();
    fcntl_setfd(&copy, FdFlags::empty()).unwrap();
    copy
}

/// Runs a worker, adopts the segments that it offers, and sends a message for each. Kills it after a random number of lines
/// of its output: at once, while it starts or attaches, before its first offer, or after some of its offers.
fn worker(prefetcher: &Arc<Prefetcher>, source: u64, random: &mut fastrand::Rng, adopted: &Sender<()>) {
    let (file, eventfd) =
        (inherited(prefetcher.arena().file().get().unwrap()), inherited(prefetcher.arena().eventfd().get().unwrap()));
    let arguments = format!("{} {} {source} {}", file.as_raw_fd(), eventfd.as_raw_fd(), random.u64(..));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_worker", "--nocapture"])
        .env(VARIABLE, arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    // Half of the workers are killed at their start: the test harness and `one_worker` print two lines each before offers.
    let mut left = if random.bool() { random.usize(..6) } else { random.usize(6..60) };
    if left == 0 {
        child.kill().unwrap();
    }
    for line in lines.lines().map_while(Result::ok) {
        if left > 0 {
            left -= 1;
            if left == 0 {
                // The worker runs meanwhile: what it is doing is not known. Its last lines are still read.
                child.kill().unwrap();
            }
        }
        let numbers: Vec<u32> = line.split(' ').filter_map(|part| part.parse().ok()).collect();
        // The test harness prints lines as well, and the last line may be truncated.
        let (["offered", .., "."], &[id, generation, index]) = (&line.split(' ').collect::<Vec<_>>()[..], &numbers[..])
        else {
            continue;
        };
        let buffer = prefetcher.arena().adopt(id, generation).unwrap().expect("an offered segment stays valid");
        let index = u8::try_from(index).unwrap();
        assert!(buffer.as_slice() == vec![!index; size(index)], "object {index} has other bytes");
        adopted.send(()).unwrap();
    }
    child.wait().unwrap();
    assert_eq!(left, 0, "the worker exited before it was killed");
}

/// Announces objects and cancels them, one announcement for each adopted segment, until all senders are gone. Returns the
/// number of segments.
fn announce(prefetcher: &Arc<Prefetcher>, source: u64, adopted: &Receiver<()>) -> usize {
    let mut random = fastrand::Rng::with_seed(WORKERS);
    let mut offered = 0;
    loop {
        let iterator = prefetcher.new_iterator(0);
        for _ in 0..random.u8(1..20) {
            let order = (0..20).map(|_| ObjectId { source, index: random.u64(0..OBJECTS.into()) });
            prefetcher.announce(iterator, &order.collect::<Vec<_>>());
            if adopted.recv().is_err() {
                prefetcher.cancel(iterator);
                return offered;
            }
            offered += 1;
        }
        prefetcher.cancel(iterator);
    }
}

#[test]
fn killed_workers_leak_no_memory_and_cause_no_wrong_bytes() {
    let (prefetcher, source) = prefetcher();
    let (sender, adopted) = channel();
    let offered = std::thread::scope(|scope| {
        for seed in 0..WORKERS {
            let (prefetcher, sender) = (&prefetcher, sender.clone());
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                (0..KILLED).for_each(|_| worker(prefetcher, source, &mut random, &sender));
            });
        }
        drop(sender);
        announce(&prefetcher, source, &adopted)
    });
    assert!(offered > 100, "{offered} segments were offered");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let stats = prefetcher.stats(None);
        let left = (stats.used_bytes, stats.granted_bytes, stats.in_flight, stats.announced);
        if left == (0, 0, 0, 0) {
            break;
        }
        assert!(Instant::now() < deadline, "used, granted, in flight, announced: {left:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn print(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// The worker process of the test above; does nothing without its variable.
#[test]
fn one_worker() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let numbers: Vec<u64> = arguments.split(' ').map(|number| number.parse().unwrap()).collect();
    let [file, eventfd, source, seed] = numbers[..] else { panic!("{arguments}") };
    let [file, eventfd] = [file, eventfd].map(|number| i32::try_from(number).unwrap());
    let [file, eventfd] = Worker::received(file, eventfd);
    print("attaching");
    let worker = Arc::new(Worker::attach(file, eventfd).unwrap());
    print("attached");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kept = Vec::new();
    loop {
        let order: Vec<u64> = (0..random.usize(1..32)).map(|_| random.u64(0..OBJECTS.into())).collect();
        let replies = worker
            .request(source, &SourceKey::indices(order.clone()), Announcement::default(), || Ok::<(), ()>(()))
            .unwrap();
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
                    print(&format!("offered {} {} {index} .", offer.id, offer.generation));
                }
                _ => {}
            }
        }
        if kept.len() > 20 {
            kept.clear();
        }
    }
}
