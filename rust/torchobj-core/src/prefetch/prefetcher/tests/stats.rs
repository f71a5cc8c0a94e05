//! Counters of a prefetcher: reasons for fewer reads, waits, and holders of the memory.

use super::*;

/// A prefetcher over `count` objects of `size` bytes in `store`, with a limit of 12 announced reads.
fn limited_prefetcher(store: Arc<FaultyStore>, count: u64, size: u64) -> (Arc<Prefetcher>, u64) {
    let policy = Policy { max_in_flight: 16, max_in_flight_cap: None, ..Policy::default() };
    let client = Arc::new(Client::new(store, policy));
    let mut manifest = Manifest::default();
    (0..count).for_each(|index| manifest.push("memory://m", &format!("k{index}"), Some(size), None));
    let prefetcher = Prefetcher::start(8 * MIB).unwrap();
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    (prefetcher, source)
}

#[test]
fn reads_followed_by_no_other_for_lack_of_memory_are_counted_once() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 200_000);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..64));
    eventually("the budget is used up", || {
        prefetcher.stats(None).in_flight == 0 && prefetcher.stats(None).memory_limited > 0
    });
    let before = prefetcher.stats(None);
    assert!(before.memory_limited <= before.objects, "{before:?}");
    for _ in 0..100 {
        prefetcher.announce(iterator, &[]);
        prefetcher.cancel(prefetcher.new_iterator(0));
    }
    let after = prefetcher.stats(None);
    assert_eq!(
        (after.memory_limited, after.request_limited, after.objects),
        (before.memory_limited, 0, before.objects)
    );
}

#[test]
fn reads_followed_by_no_other_because_of_the_limit_are_counted_once() {
    let (_, _, store) = prefetcher(MIB, 200, 1000);
    let (prefetcher, source) = limited_prefetcher(Arc::new(FaultyStore::new(store)), 200, 1000);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..200));
    all_read(&prefetcher, 200);
    let stats = prefetcher.stats(None);
    assert!((1..=200).contains(&stats.request_limited) && stats.memory_limited == 0, "{stats:?}");
}

#[test]
fn reads_after_which_no_more_was_announced_for_lack_of_memory_are_limited_by_it() {
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let faulty = Arc::new(FaultyStore::new(store));
    let (prefetcher, source) = limited_prefetcher(faulty.clone(), 20, 1000);
    let iterator = prefetcher.new_iterator(7);
    let read = |indices: std::ops::Range<u64>, limited: bool| {
        faulty.script(Operation::Get, [Fault::Delay(Duration::from_millis(100)); 2]);
        prefetcher.announce(iterator, &objects(source, indices.clone()));
        if limited {
            prefetcher.limit_by_memory(iterator);
        }
        all_read(&prefetcher, indices.end);
        prefetcher.stats(Some(7)).memory_limited
    };
    assert_eq!(read(0..2, true), 2);
    assert_eq!(read(2..4, false), 2, "further objects were announced");
}

#[test]
fn wait_time_is_the_sum_over_requests_of_workers_and_this_process() {
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let faulty = Arc::new(FaultyStore::new(store));
    let (prefetcher, source) = limited_prefetcher(faulty.clone(), 20, 1000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let late = Duration::from_millis(100);
    faulty.script(Operation::Get, [Fault::Delay(late); 2]);
    let later = indices([0, 1]);
    let ahead = Announcement { iterator: worker.new_iterator(), objects: &later };
    drop(worker.request(source, &[], ahead, no_check).unwrap());
    all_read(&prefetcher, 2);
    assert_eq!(prefetcher.stats(None).waited_us, 0, "nothing was demanded");
    faulty.script(Operation::Get, [Fault::Delay(late)]);
    let demanded = Instant::now();
    drop(worker.request(source, &indices([0, 1]), Announcement::default(), no_check).unwrap());
    let Stats { waited_us, hits, late: being_read, queued, misses, objects: read, .. } = prefetcher.stats(None);
    assert!(Duration::from_micros(waited_us) <= demanded.elapsed(), "{waited_us}");
    assert_eq!((hits, being_read, queued, misses), (2, 0, 0, 0), "both were ready");
    assert_eq!((read, faulty.pending()), (2, 1), "no further request was sent");
    let before = (prefetcher.stats(None).waited_us, Instant::now());
    faulty.script(Operation::Get, [Fault::Delay(late); 8]);
    for requested in [2, 4] {
        drop(worker.request(source, &indices([requested, requested + 1]), Announcement::default(), no_check).unwrap());
        drop(runtime().block_on(prefetcher.take(0, source, &indices([requested + 10, requested + 11]))));
    }
    // Two objects of one request count as one wait: twice as much would be longer than the requests took.
    let waited = Duration::from_micros(prefetcher.stats(None).waited_us - before.0);
    assert!((4 * late..=before.1.elapsed()).contains(&waited), "{waited:?}");
}

#[test]
fn memory_is_counted_as_read_ahead_granted_or_held() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 12, 100_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..12));
    all_read(&prefetcher, 12);
    let counts = || {
        let Stats { used_bytes, granted_bytes, ahead_bytes, .. } = prefetcher.stats(None);
        [ahead_bytes, granted_bytes, used_bytes - granted_bytes - ahead_bytes]
            .map(|bytes| bytes / Arena::charge(100_000))
    };
    assert_eq!(counts(), [12, 0, 0]);
    let claimed = worker.request(source, &indices([0, 1, 2]), Announcement::default(), no_check).unwrap();
    let held = runtime().block_on(prefetcher.take(0, source, &indices([3, 4])));
    assert_eq!(counts(), [7, 3, 2]);
    drop(held);
    drop(claimed);
    prefetcher.cancel(iterator);
    eventually("all memory is free", || prefetcher.stats(None).used_bytes == 0);
    assert_eq!(counts(), [0, 0, 0]);
}

#[test]
fn each_loader_has_its_own_counters() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 40, 5000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    worker.set_loader(7);
    // Both announce the same objects; each takes its own.
    let [first, second] = [8, 9].map(|loader| prefetcher.new_iterator(loader));
    prefetcher.announce(first, &objects(source, 0..10));
    prefetcher.announce(second, &objects(source, 0..10));
    all_read(&prefetcher, 10);
    drop(runtime().block_on(prefetcher.take(9, source, &indices(0..10))));
    assert_eq!([first, second].map(|iterator| prefetcher.taken(iterator)), [0, 10]);
    let later = indices([20, 21]);
    let ahead = Announcement { iterator: worker.new_iterator(), objects: &later };
    drop(worker.request(source, &indices([30, 31, 32]), ahead, no_check).unwrap());
    all_read(&prefetcher, 15);
    drop(worker.request(source, &indices([20, 21]), Announcement::default(), no_check).unwrap());
    let counts = |loader| {
        let Stats { hits, misses, objects, bytes, requests, .. } = prefetcher.stats(loader);
        (hits, misses, objects, bytes, requests.first_byte.quantile(0.5).is_some())
    };
    assert_eq!(counts(Some(7)), (2, 3, 5, 25_000, true));
    assert_eq!(counts(Some(8)), (0, 0, 10, 50_000, true), "it was announced first, and was read for it");
    assert_eq!(counts(Some(9)), (10, 0, 0, 0, false));
    assert_eq!(counts(None), (12, 3, 15, 75_000, true));
    prefetcher.remove_loader(7);
    assert_eq!(counts(Some(7)), (0, 0, 0, 0, false));
}
