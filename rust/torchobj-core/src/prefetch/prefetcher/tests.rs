//! A prefetcher over objects in memory, with workers in threads of this process.

mod named;

use std::time::Duration;

use bytes::Bytes;

use super::super::sources::UNKNOWN_BYTES;
use super::*;
use crate::arena::{Announcement, Reply, Unanswered, Worker};
use crate::client::Client;
use crate::faulty_store::{Fault, FaultyStore};
use crate::manifest::Manifest;
use crate::memory::MemoryStore;
use crate::object_ref::ObjectRef;
use crate::policy::Policy;
use crate::types::PutOptions;

mod coalesce;
mod faults;
mod stats;

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
    let prefetcher = Prefetcher::start(budget).unwrap();
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    (prefetcher, source, store)
}

fn objects(source: u64, indices: impl IntoIterator<Item = u64>) -> Vec<ObjectId> {
    indices.into_iter().map(|index| ObjectId { source, index }).collect()
}

fn indices(indices: impl IntoIterator<Item = u64>) -> Vec<SourceKey> {
    SourceKey::indices(indices)
}

fn keys(references: &[Arc<ObjectRef>]) -> Vec<SourceKey> {
    references.iter().cloned().map(SourceKey::Ref).collect()
}

fn client_of(prefetcher: &Prefetcher, source: u64) -> Arc<Client> {
    match &prefetcher.sources.lock()[&source] {
        RegisteredSource::Listed(source) => source.clients[0].clone(),
        RegisteredSource::Named(_) => panic!("the source is listed"),
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(300), "not within five minutes: {what}");
        // Most conditions hold at once.
        if began.elapsed() < Duration::from_micros(500) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until `count` objects are read and ready: they are counted a moment earlier.
fn all_read(prefetcher: &Prefetcher, count: u64) {
    eventually("all objects are ready", || {
        prefetcher.stats(None).objects == count && prefetcher.stats(None).in_flight == 0
    });
}

fn no_check() -> Result<(), ()> {
    Ok(())
}

#[test]
fn announced_objects_are_ready_when_they_are_taken() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 100, 5000);
    let order: Vec<u64> = (0..100).map(|index| index * 37 % 100).collect();
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, order.clone()));
    all_read(&prefetcher, 100);
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(order.clone())));
    for (index, fetched) in order.iter().zip(taken) {
        assert!(fetched.unwrap().buffer.as_slice() == [u8::try_from(*index).unwrap(); 5000]);
    }
    let stats = prefetcher.stats(None);
    assert_eq!((stats.hits, stats.late, stats.queued, stats.misses), (100, 0, 0, 0));
    assert_eq!(stats.used_bytes, 0);
}

#[test]
fn objects_are_read_without_announcement() {
    let (prefetcher, source, _store) = prefetcher(MIB, 20, 300_000);
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(0..20)));
    assert!(taken.iter().enumerate().all(|(index, fetched)| {
        fetched.as_ref().unwrap().buffer.as_slice() == vec![u8::try_from(index).unwrap(); 300_000]
    }));
    let stats = prefetcher.stats(None);
    assert_eq!(stats.misses, 20);
    // 6 MB in a budget of 1 MiB: demanded reads exceed the budget, and are counted.
    assert!(stats.over_budget > 0);
    drop(taken);
    assert_eq!(prefetcher.stats(None).used_bytes, 0);
}

#[test]
fn announced_reads_stay_within_the_budget_and_continue_when_memory_is_freed() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 200_000);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..64));
    eventually("the budget is used", || prefetcher.stats(None).objects >= 8);
    for index in 0..64 {
        assert!(prefetcher.stats(None).used_bytes <= 2 * MIB);
        let [fetched] = <[_; 1]>::try_from(runtime().block_on(prefetcher.take(0, source, &indices([index])))).unwrap();
        assert_eq!(fetched.unwrap().buffer.as_slice()[0], u8::try_from(index).unwrap());
    }
    let stats = prefetcher.stats(None);
    assert_eq!((stats.over_budget, stats.misses, stats.objects), (0, 0, 64));
}

#[test]
fn two_uses_of_an_object_are_read_once_and_share_no_memory() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 2, 10_000);
    let uses = [0, 1, 0, 0, 1];
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, uses));
    let mut taken = runtime().block_on(prefetcher.take(0, source, &indices(uses)));
    taken[0].as_mut().unwrap().buffer.as_mut_slice().fill(99);
    for (fetched, expected) in taken.iter().zip([99, 1, 0, 0, 1]) {
        assert!(fetched.as_ref().unwrap().buffer.as_slice() == [expected; 10_000]);
    }
    let stats = prefetcher.stats(None);
    assert_eq!(stats.objects, 2);
}

#[test]
fn a_cancelled_iterator_leaves_no_memory_in_use() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 50, 100_000);
    for _ in 0..20 {
        let iterator = prefetcher.new_iterator(0);
        prefetcher.announce(iterator, &objects(source, 0..50));
        drop(runtime().block_on(prefetcher.take(0, source, &indices(0..3))));
        prefetcher.cancel(iterator);
    }
    eventually("all memory is free", || {
        let stats = prefetcher.stats(None);
        stats.used_bytes == 0 && stats.in_flight == 0 && stats.announced == 0
    });
}

#[test]
fn an_iterator_in_use_gets_memory_that_an_idle_one_holds() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 100_000);
    let (idle, in_use) = (prefetcher.new_iterator(0), prefetcher.new_iterator(0));
    prefetcher.announce(idle, &objects(source, 0..32));
    eventually("the idle iterator fills the budget", || prefetcher.stats(None).used_bytes > MIB + MIB / 2);
    prefetcher.announce(in_use, &objects(source, 32..64));
    drop(runtime().block_on(prefetcher.take(0, source, &indices([32]))));
    eventually("the iterator in use reads ahead", || {
        prefetcher.window().announced_bytes(in_use) > 0 && prefetcher.stats(None).evicted > 4
    });
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(33..64)));
    assert!(taken.into_iter().all(|fetched| fetched.is_ok()));
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(0..32)));
    assert!(taken.into_iter().all(|fetched| fetched.is_ok()));
}

#[test]
fn a_failed_read_is_an_error_of_its_object_only() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 3, 100);
    let mut manifest = Manifest::default();
    let client = client_of(&prefetcher, source);
    for key in ["k0", "missing", "k2"] {
        manifest.push("memory://m", key, None, None);
    }
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..3));
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(0..4)));
    assert_eq!(taken[1].as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(taken[3].as_ref().unwrap_err().kind(), ErrorKind::Config);
    assert!(taken[0].is_ok() && taken[2].is_ok());
    assert_eq!(prefetcher.stats(None).failed, 2);
}

#[test]
fn announced_reads_keep_permits_free_for_demanded_ones() {
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let faulty = Arc::new(FaultyStore::new(store));
    let policy = Policy { max_in_flight: 16, max_in_flight_cap: None, ..Policy::default() };
    let client = Arc::new(Client::new(faulty.clone(), policy));
    let mut manifest = Manifest::default();
    (0..20).for_each(|index| manifest.push("memory://m", &format!("k{index}"), Some(1000), None));
    let prefetcher = Prefetcher::start(8 * MIB).unwrap();
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    faulty.script(Operation::Get, [Fault::Delay(Duration::from_secs(3600)); 12]);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..20));
    eventually("the limit of reads is reached", || faulty.pending() == 0);
    let stats = prefetcher.stats(None);
    assert_eq!((stats.in_flight, stats.in_flight_limit, stats.objects), (12, 12, 0));
    let [fetched] = <[_; 1]>::try_from(runtime().block_on(prefetcher.take(0, source, &indices([19])))).unwrap();
    assert!(fetched.unwrap().buffer.as_slice() == [19; 1000]);
    eventually("no other read started", || prefetcher.stats(None).in_flight == 12);
    assert_eq!(prefetcher.stats(None).objects, 1);
    prefetcher.cancel(iterator);
    eventually("cancelled reads end", || prefetcher.stats(None).in_flight == 0);
}

#[test]
fn metrics_include_each_client_once_and_remain_after_its_source_is_removed() {
    let (prefetcher, source, store) = prefetcher(8 * MIB, 30, 1000);
    let faulty = Arc::new(FaultyStore::new(store));
    let client = Arc::new(Client::new(faulty.clone(), Policy::default()));
    faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Reset), Fault::Fail(ErrorKind::Throttled)]);
    let manifest = match &prefetcher.sources.lock()[&source] {
        RegisteredSource::Listed(source) => source.manifest.clone(),
        RegisteredSource::Named(_) => panic!("the source is listed"),
    };
    let another =
        prefetcher.add_source(ListedSource { manifest: manifest.clone(), clients: vec![client.clone()], pinned: true });
    let same = prefetcher.add_source(ListedSource { manifest, clients: vec![client], pinned: true });
    assert_eq!(prefetcher.stats(None).in_flight_limit, 2 * 60);
    for source in [source, another, same] {
        assert!(
            runtime().block_on(prefetcher.take(0, source, &indices(0..10))).into_iter().all(|fetched| fetched.is_ok())
        );
    }
    [source, another, same].iter().for_each(|source| prefetcher.remove_source(*source));
    let Stats { requests, in_flight_limit, .. } = prefetcher.stats(None);
    assert_eq!((requests.retries, requests.throttled, requests.connect_failures, in_flight_limit), (2, 1, 0, 1));
    assert!(requests.first_byte.quantile(0.5).is_some() && requests.body.quantile(0.99).is_some());
}

#[test]
fn a_worker_requests_holds_and_returns_segments() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 60, 20_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..30));
    let order: Vec<u64> = (0..60).rev().collect();
    let replies = worker.request(source, &indices(order.clone()), Announcement::default(), no_check).unwrap();
    for (index, reply) in order.iter().zip(&replies) {
        let Reply::Claimed(claim) = reply else { panic!("{reply:?}") };
        assert!(claim.buffer().as_slice() == [u8::try_from(*index).unwrap(); 20_000]);
    }
    assert!(prefetcher.stats(None).granted_bytes > 60 * 20_000);
    drop(replies);
    eventually("returned segments are free", || prefetcher.stats(None).used_bytes == 0);
    let [Reply::Failed(error)] =
        &worker.request(source, &indices([77]), Announcement::default(), no_check).unwrap()[..]
    else {
        panic!("there are 60")
    };
    assert_eq!(Error::from_bytes(error).kind(), ErrorKind::Config);
}

#[test]
fn objects_announced_by_a_worker_are_read_early_and_dropped_when_its_iterator_ends() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 60, 20_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    assert_eq!(worker.budget(), prefetcher.arena().budget());
    let [first, second] = [worker.new_iterator(), worker.new_iterator()];
    let ahead = indices(1..40);
    drop(worker.request(source, &indices([0]), Announcement { iterator: first, objects: &ahead }, no_check).unwrap());
    all_read(&prefetcher, 40);
    drop(worker.request(source, &indices([1, 2]), Announcement::default(), no_check).unwrap());
    assert_eq!((prefetcher.stats(None).hits, prefetcher.stats(None).misses), (2, 1));
    assert_eq!(prefetcher.stats(None).announced, 37);
    // Another iterator of the worker does not affect it.
    drop(
        worker.request(source, &[], Announcement { iterator: second, objects: &indices([50, 51]) }, no_check).unwrap(),
    );
    assert_eq!(prefetcher.stats(None).announced, 39);
    worker.end_iterator(first);
    drop(worker.request(source, &indices([50]), Announcement::default(), no_check).unwrap());
    assert_eq!(prefetcher.stats(None).announced, 1);
    worker.end_iterator(second);
    // An iterator without announcements.
    worker.end_iterator(worker.new_iterator());
    for _ in 0..2 {
        drop(worker.request(source, &indices([3]), Announcement::default(), no_check).unwrap());
    }
    eventually("all memory is free", || {
        prefetcher.stats(None).announced == 0 && prefetcher.stats(None).used_bytes == 0
    });
}

#[test]
fn lists_longer_than_a_request_are_sent_in_several() {
    let (prefetcher, source, _store) = prefetcher(64 * MIB, 10, 100);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let order = indices((0..10).cycle().take(5000));
    let ahead = Announcement { iterator: worker.new_iterator(), objects: &order };
    assert_eq!(worker.request(source, &order, ahead, no_check).unwrap().len(), 5000);
    assert_eq!(prefetcher.stats(None).announced, 5000);
    assert_eq!(worker.request(source, &order, Announcement::default(), no_check).unwrap().len(), 5000);
    assert_eq!(prefetcher.stats(None).announced, 0);
}

#[test]
fn an_offered_and_dropped_segment_is_adopted_once() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 4, 20_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let replies = worker.request(source, &indices([3]), Announcement::default(), no_check).unwrap();
    let [Reply::Claimed(claim)] = &replies[..] else { panic!("{replies:?}") };
    let offer = claim.offer().unwrap();
    assert_eq!(claim.offer(), None);
    drop(replies);
    let buffer = prefetcher.arena().adopt(offer.id, offer.generation).unwrap().unwrap();
    assert!(prefetcher.arena().adopt(offer.id, offer.generation).unwrap().is_none());
    assert_eq!(buffer.len(), 20_000);
    assert_eq!((prefetcher.stats(None).transferred, prefetcher.stats(None).copied), (1, 0));
    drop(buffer);
    assert_eq!(prefetcher.stats(None).used_bytes, 0);
}

#[test]
fn an_interrupted_worker_stops_waiting() {
    // An arena without a service task: nothing answers the request.
    let unserved = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&unserved).unwrap());
    let ended = worker.request(1, &indices([1]), Announcement::default(), || Err::<(), _>("a signal"));
    assert!(matches!(ended, Err(Unanswered::Interrupted("a signal"))));
}

#[test]
fn many_concurrent_workers_get_the_right_objects() {
    let (prefetcher, source, _store) = prefetcher(4 * MIB, 200, 50_000);
    std::thread::scope(|scope| {
        for seed in 0..4_u64 {
            let prefetcher = &prefetcher;
            scope.spawn(move || {
                let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
                let mut random = fastrand::Rng::with_seed(seed);
                let iterator = prefetcher.new_iterator(0);
                for _ in 0..40 {
                    let batch: Vec<u64> = (0..16).map(|_| random.u64(0..200)).collect();
                    if random.bool() {
                        prefetcher.announce(iterator, &objects(source, batch.clone()));
                    }
                    let replies =
                        worker.request(source, &indices(batch.clone()), Announcement::default(), no_check).unwrap();
                    for (index, reply) in batch.iter().zip(replies) {
                        let Reply::Claimed(claim) = reply else { panic!("{reply:?}") };
                        assert!(claim.buffer().as_slice() == [u8::try_from(*index).unwrap(); 50_000]);
                    }
                }
                prefetcher.cancel(iterator);
            });
        }
    });
    eventually("all memory is free", || prefetcher.stats(None).used_bytes == 0);
}

#[test]
fn memory_freed_by_the_trainer_or_a_worker_is_reused_at_once() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 100_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..64));
    let mut held = runtime().block_on(prefetcher.take(0, source, &indices(0..6)));
    let mut claimed =
        worker.request(source, &indices([6, 7, 8, 9, 10, 11]), Announcement::default(), no_check).unwrap();
    let mut fastest = [Duration::MAX; 2];
    for _ in 0..6 {
        for from_worker in [false, true] {
            eventually("the budget is used up", || {
                prefetcher.stats(None).in_flight == 0 && !prefetcher.arena().fits(100_000, 0)
            });
            let before = prefetcher.stats(None).objects;
            let freed = Instant::now();
            if from_worker {
                drop(claimed.pop());
            } else {
                drop(held.pop());
            }
            eventually("another object is read", || prefetcher.stats(None).objects > before);
            let fastest = &mut fastest[usize::from(from_worker)];
            *fastest = freed.elapsed().min(*fastest);
        }
    }
    // Without notifications the owner checks once a second, and each of these would take that long.
    assert!(fastest.into_iter().max() < Some(Duration::from_millis(500)), "{fastest:?}");
}
