//! A prefetcher over objects in memory, with workers in threads of this process.

use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::arena::{Reply, Unanswered, Worker};
use crate::memory::MemoryStore;
use crate::transfer::Policy;
use crate::types::PutOptions;

const MIB: u64 = 1 << 20;

/// A prefetcher over `count` objects, object `i` being `size` times the byte `i`.
fn prefetcher(budget: u64, count: u8, size: usize) -> (Arc<Prefetcher>, u64, Arc<MemoryStore>) {
    let store = Arc::new(MemoryStore::new(format!("prefetch-{}", fastrand::u64(..))));
    let client = Arc::new(Client::new(store.clone(), Policy::default()));
    let mut manifest = Manifest::default();
    runtime().block_on(async {
        for index in 0..count {
            let body = Bytes::from(vec![index; size]);
            let version = client.put(&format!("k{index}"), body.into(), &PutOptions::default()).await.unwrap();
            manifest.push("memory://m", &format!("k{index}"), Some(size as u64), Some(&version));
        }
    });
    let prefetcher = Prefetcher::start(budget, 8).unwrap();
    let source = prefetcher.add_source(Source { manifest: Arc::new(manifest), clients: vec![client] });
    (prefetcher, source, store)
}

fn objects(source: u64, indices: impl IntoIterator<Item = u64>) -> Vec<Object> {
    indices.into_iter().map(|index| Object { source, index }).collect()
}

fn client_of(prefetcher: &Prefetcher, source: u64) -> Arc<Client> {
    match &prefetcher.sources()[&source] {
        Known::Listed(source) => source.clients[0].clone(),
        Known::Named(_) => panic!("of a listed source"),
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..5000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("not within 5 s: {what}");
}

fn never() -> Result<(), ()> {
    Ok(())
}

#[test]
fn what_was_announced_is_there_when_it_is_taken() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 100, 5000);
    let order: Vec<u64> = (0..100).map(|index| index * 37 % 100).collect();
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, order.clone()));
    eventually("all is read", || prefetcher.stats().objects == 100);
    let taken = runtime().block_on(prefetcher.take(&objects(source, order.clone())));
    for (index, landed) in order.iter().zip(taken) {
        assert!(landed.unwrap().buffer.as_slice() == [u8::try_from(*index).unwrap(); 5000]);
    }
    let stats = prefetcher.stats();
    assert_eq!((stats.hits, stats.late, stats.queued, stats.misses), (100, 0, 0, 0));
    assert_eq!(stats.memory.used, 0);
}

#[test]
fn nothing_announced_is_right_all_the_same() {
    let (prefetcher, source, _store) = prefetcher(MIB, 20, 300_000);
    let taken = runtime().block_on(prefetcher.take(&objects(source, 0..20)));
    assert!(taken.iter().enumerate().all(|(index, landed)| {
        landed.as_ref().unwrap().buffer.as_slice() == vec![u8::try_from(index).unwrap(); 300_000]
    }));
    let stats = prefetcher.stats();
    assert_eq!(stats.misses, 20);
    // 6 MB in a budget of 1 MiB: demanded reads go on, and are counted.
    assert!(stats.memory.overdrawn > 0);
    drop(taken);
    assert_eq!(prefetcher.stats().memory.used, 0);
}

#[test]
fn announced_reads_stay_within_the_budget_and_go_on_as_it_is_freed() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 200_000);
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..64));
    eventually("the budget is used", || prefetcher.stats().objects >= 8);
    for index in 0..64 {
        assert!(prefetcher.stats().memory.used <= 2 * MIB);
        let [landed] = <[_; 1]>::try_from(runtime().block_on(prefetcher.take(&objects(source, [index])))).unwrap();
        assert_eq!(landed.unwrap().buffer.as_slice()[0], u8::try_from(index).unwrap());
    }
    let stats = prefetcher.stats();
    assert_eq!((stats.memory.overdrawn, stats.misses, stats.objects), (0, 0, 64));
}

#[test]
fn two_uses_of_an_object_are_read_once_and_share_no_memory() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 2, 10_000);
    let uses = objects(source, [0, 1, 0, 0, 1]);
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &uses);
    let mut taken = runtime().block_on(prefetcher.take(&uses));
    taken[0].as_mut().unwrap().buffer.as_mut_slice().fill(99);
    for (landed, expected) in taken.iter().zip([99, 1, 0, 0, 1]) {
        assert!(landed.as_ref().unwrap().buffer.as_slice() == [expected; 10_000]);
    }
    let stats = prefetcher.stats();
    assert_eq!(stats.objects, 2);
}

#[test]
fn a_cancelled_iterator_leaves_nothing_behind() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 50, 100_000);
    for _ in 0..20 {
        let iterator = prefetcher.new_iterator();
        prefetcher.announce(iterator, &objects(source, 0..50));
        drop(runtime().block_on(prefetcher.take(&objects(source, 0..3))));
        prefetcher.cancel(iterator);
    }
    eventually("all is free", || {
        let stats = prefetcher.stats();
        stats.memory.used == 0 && stats.in_flight == 0 && stats.announced == 0
    });
}

#[test]
fn an_iterator_in_use_gets_memory_that_an_idle_one_holds() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 100_000);
    let (parked, live) = (prefetcher.new_iterator(), prefetcher.new_iterator());
    prefetcher.announce(parked, &objects(source, 0..32));
    eventually("the parked one is full", || prefetcher.stats().memory.used > MIB + MIB / 2);
    prefetcher.announce(live, &objects(source, 32..64));
    drop(runtime().block_on(prefetcher.take(&objects(source, [32]))));
    eventually("the live one reads ahead", || {
        prefetcher.window().announced_bytes(live) > 0 && prefetcher.stats().evicted > 4
    });
    let taken = runtime().block_on(prefetcher.take(&objects(source, 33..64)));
    assert!(taken.into_iter().all(|landed| landed.is_ok()));
    let taken = runtime().block_on(prefetcher.take(&objects(source, 0..32)));
    assert!(taken.into_iter().all(|landed| landed.is_ok()));
}

#[test]
fn an_object_that_cannot_be_read_is_an_error_for_who_needs_it() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 3, 100);
    let mut manifest = Manifest::default();
    let client = client_of(&prefetcher, source);
    for key in ["k0", "missing", "k2"] {
        manifest.push("memory://m", key, None, None);
    }
    let source = prefetcher.add_source(Source { manifest: Arc::new(manifest), clients: vec![client] });
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..3));
    let taken = runtime().block_on(prefetcher.take(&objects(source, 0..4)));
    assert_eq!(taken[1].as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(taken[3].as_ref().unwrap_err().kind(), ErrorKind::Config);
    assert!(taken[0].is_ok() && taken[2].is_ok());
    assert_eq!(prefetcher.stats().failed, 2);
}

#[test]
fn a_worker_asks_holds_and_releases() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 60, 20_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..30));
    let order: Vec<u64> = (0..60).rev().collect();
    let replies = worker.ask(source, &order, never).unwrap();
    for (index, reply) in order.iter().zip(&replies) {
        let Reply::Landed(claim) = reply else { panic!("{reply:?}") };
        assert!(claim.buffer().as_slice() == [u8::try_from(*index).unwrap(); 20_000]);
    }
    assert!(prefetcher.stats().memory.granted > 60 * 20_000);
    drop(replies);
    eventually("what was released is free", || prefetcher.stats().memory.used == 0);
    let [Reply::Failed(error)] = &worker.ask(source, &[77], never).unwrap()[..] else { panic!("there are 60") };
    assert_eq!(Error::from_bytes(error).kind(), ErrorKind::Config);
}

#[test]
fn what_a_worker_hands_on_is_the_trainers_once() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 4, 20_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let replies = worker.ask(source, &[3], never).unwrap();
    let [Reply::Landed(claim)] = &replies[..] else { panic!("{replies:?}") };
    let handed = claim.hand().unwrap();
    assert_eq!(claim.hand(), None);
    drop(replies);
    let segment = prefetcher.arena().adopt(handed.id, handed.generation).unwrap();
    assert!(prefetcher.arena().adopt(handed.id, handed.generation).is_none());
    assert_eq!(segment.len(), 20_000);
    drop(segment);
    assert_eq!(prefetcher.stats().memory.used, 0);
}

/// The objects of a listed source, named one by one; `key` may have a range: `k3 10..20`.
fn names(prefetcher: &Arc<Prefetcher>, listed: u64) -> (u64, impl Fn(&str) -> ObjectRef) {
    let client = client_of(prefetcher, listed);
    let source = prefetcher.add_names(Arc::new(move |base| match base {
        "memory://m" => Ok(client.clone()),
        _ => Err(Error::new(ErrorKind::Config, Operation::Connect, base, "no such bucket")),
    }));
    let named = |key: &str| {
        let (key, range) = key.split_once(' ').unwrap_or((key, "0.."));
        let (start, end) = range.split_once("..").unwrap();
        let base = if key.starts_with('k') { "memory://m" } else { "memory://other" };
        ObjectRef::new(format!("{base}/{key}"), start.parse().unwrap(), end.parse().ok(), None, None).unwrap()
    };
    (source, named)
}

#[test]
fn what_is_named_is_read_ahead_and_a_range_counts_as_its_length() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 3, 100_000);
    let (source, named) = names(&prefetcher, listed);
    let refs: Vec<ObjectRef> = ["k0", "k1 5..25", "k2 99990..", "k1 5..25", "k1 90000..200000"].map(named).into();
    let iterator = prefetcher.new_iterator();
    let objects = prefetcher.objects(source, refs.iter());
    assert_eq!(objects[1], objects[3]);
    prefetcher.announce(iterator, &objects);
    let charges = [UNKNOWN_BYTES, 20, UNKNOWN_BYTES, 20, 110_000].map(Arena::charge);
    assert_eq!(prefetcher.pending(iterator), charges.iter().sum());
    eventually("all is read", || prefetcher.stats().in_flight == 0 && prefetcher.stats().objects == 4);
    let taken =
        runtime().block_on(prefetcher.take_by_name(source, &refs.into_iter().map(Arc::new).collect::<Vec<_>>()));
    for (landed, (byte, len)) in taken.iter().zip([(0, 100_000), (1, 20), (2, 10), (1, 20), (1, 10_000)]) {
        assert!(landed.as_ref().unwrap().buffer.as_slice() == vec![byte; len]);
    }
    assert_eq!((prefetcher.stats().hits, prefetcher.stats().misses), (5, 0));
}

#[test]
fn a_worker_asks_by_names_and_each_that_cannot_be_read_fails_alone() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 3, 1000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &prefetcher.objects(source, [named("k1 1..4")].iter()));
    let mut asked: Vec<Vec<u8>> =
        ["k0", "k1 1..4", "missing", "k5", "k2 1000..2000"].map(|key| named(key).to_bytes()).into();
    asked.push(b"no name".to_vec());
    let replies = worker.ask_by_name(source, &asked, never).unwrap();
    let found: Vec<Result<usize, ErrorKind>> = replies
        .iter()
        .map(|reply| match reply {
            Reply::Landed(claim) => Ok(claim.buffer().len()),
            Reply::Failed(error) => Err(Error::from_bytes(error).kind()),
        })
        .collect();
    let [config, missing, range] = [ErrorKind::Config, ErrorKind::NotFound, ErrorKind::Range].map(Err);
    assert_eq!(found, [Ok(1000), Ok(3), config, missing, range, config]);
    assert_eq!(prefetcher.stats().misses, 4);
    // By number again, through the same lane.
    assert!(matches!(worker.ask(listed, &[2], never).unwrap()[..], [Reply::Landed(_)]));
    drop(replies);
    eventually("what was released is free", || prefetcher.stats().memory.used == 0);
}

#[test]
fn a_sample_of_very_many_names_is_read_whole() {
    let (prefetcher, listed, _store) = prefetcher(64 * MIB, 1, 1000);
    let (source, named) = names(&prefetcher, listed);
    // More than are kept without a look at which are used.
    let refs: Vec<Arc<ObjectRef>> = (0..66_000_u64).map(|end| Arc::new(named(&format!("k0 0..{end}")))).collect();
    for _ in 0..2 {
        let taken = runtime().block_on(prefetcher.take_by_name(source, &refs));
        for (end, landed) in taken.into_iter().enumerate() {
            assert_eq!(landed.unwrap().buffer.len(), end.min(1000));
        }
    }
}

#[test]
fn names_that_fill_several_requests_are_all_answered_in_order() {
    let (prefetcher, listed, _store) = prefetcher(64 * MIB, 1, 20_000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let asked: Vec<Vec<u8>> = (0..5000).map(|end| named(&format!("k0 0..{end}")).to_bytes()).collect();
    let long = named(&format!("k{}", "é".repeat(8000))).to_bytes();
    let replies = worker.ask_by_name(source, &asked, never).unwrap();
    assert_eq!(replies.len(), 5000);
    for (len, reply) in replies.iter().enumerate() {
        let Reply::Landed(claim) = reply else { panic!("{reply:?}") };
        assert_eq!(claim.len(), len as u64);
    }
    let replies = worker.ask_by_name(source, &[long.clone(), asked[9].clone(), long], never).unwrap();
    assert!(matches!(replies[..], [Reply::Failed(_), Reply::Landed(_), Reply::Failed(_)]));
}

#[test]
fn a_worker_that_is_interrupted_stops_waiting() {
    let (prefetcher, _source, _store) = prefetcher(MIB, 1, 10);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    // A handler that never answers: the request goes to an arena that nobody serves.
    let deaf = Arena::create(MIB).unwrap();
    let unheard = Arc::new(Worker::inherit(&deaf).unwrap());
    let ended = unheard.ask(1, &[1], || Err::<(), _>("a signal"));
    assert!(matches!(ended, Err(Unanswered::Interrupted("a signal"))));
    drop(worker);
}

#[test]
fn many_workers_at_once_get_what_they_asked_for() {
    let (prefetcher, source, _store) = prefetcher(4 * MIB, 200, 50_000);
    std::thread::scope(|scope| {
        for seed in 0..4_u64 {
            let prefetcher = &prefetcher;
            scope.spawn(move || {
                let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
                let mut random = fastrand::Rng::with_seed(seed);
                let iterator = prefetcher.new_iterator();
                for _ in 0..40 {
                    let batch: Vec<u64> = (0..16).map(|_| random.u64(0..200)).collect();
                    if random.bool() {
                        prefetcher.announce(iterator, &objects(source, batch.clone()));
                    }
                    let replies = worker.ask(source, &batch, never).unwrap();
                    for (index, reply) in batch.iter().zip(replies) {
                        let Reply::Landed(claim) = reply else { panic!("{reply:?}") };
                        assert!(claim.buffer().as_slice() == [u8::try_from(*index).unwrap(); 50_000]);
                    }
                }
                prefetcher.cancel(iterator);
            });
        }
    });
    eventually("all is free", || prefetcher.stats().memory.used == 0);
}
