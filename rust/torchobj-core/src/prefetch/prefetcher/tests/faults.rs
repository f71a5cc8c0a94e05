//! Failing reads, and reads whose waiters are gone: they end and leave no memory in use.

use std::ops::Range;

use super::*;

/// Another source of the same objects, over a store that fails by script.
fn faulty(prefetcher: &Prefetcher, store: Arc<MemoryStore>, size: u64, policy: Policy) -> (Arc<FaultyStore>, u64) {
    let faulty = Arc::new(FaultyStore::new(store));
    let client = Arc::new(Client::new(faulty.clone(), policy));
    let mut manifest = Manifest::default();
    (0..20).for_each(|index| manifest.push("memory://m", &format!("k{index}"), Some(size), None));
    let source =
        prefetcher.add_source(ListedSource { manifest: Arc::new(manifest), clients: vec![client], pinned: true });
    (faulty, source)
}

#[test]
fn a_panicking_read_is_an_error_of_its_object_only() {
    let (prefetcher, _, store) = prefetcher(MIB, 20, 1000);
    let (faulty, source) = faulty(&prefetcher, store, 1000, Policy::default());
    faulty.script(Operation::Get, [Fault::Panic; 3]);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &objects(source, 0..10));
    let taken = runtime().block_on(prefetcher.take(0, source, &indices(0..20)));
    let failed: Vec<_> = taken.iter().filter_map(|fetched| fetched.as_ref().err()).collect();
    assert_eq!(failed.len(), 3);
    assert!(failed.iter().all(|error| error.to_string().contains("panicked: a bug")));
    drop(taken);
    eventually("all counters are zero", || {
        let stats = prefetcher.stats(None);
        (stats.in_flight, stats.announced, stats.used_bytes, prefetcher.window().reserved()) == (0, 0, 0, 0)
    });
}

#[test]
fn a_wrong_size_fails_its_objects_only() {
    let (prefetcher, right, store) = prefetcher(MIB, 20, 1000);
    let policy = Policy { max_attempts: 2, ..Policy::default() };
    let (_, wrong) = faulty(&prefetcher, store, u64::MAX, policy);
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &[objects(wrong, 0..20), objects(right, 0..20)].concat());
    assert_eq!(runtime().block_on(prefetcher.take(0, wrong, &indices(0..20))).len(), 20);
    assert!(runtime().block_on(prefetcher.take(0, right, &indices(0..20))).iter().all(Result::is_ok));
    eventually("no memory is reserved", || prefetcher.window().reserved() == 0);
}

#[test]
fn an_announcement_concurrent_with_pump_is_read_at_once() {
    // Without a service task there is no periodic check: a read that does not start at once never starts.
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let prefetcher = Prefetcher::without_service(MIB).unwrap();
    let policy = Policy { max_in_flight: 1, max_in_flight_cap: None, ..Policy::default() };
    let (_, source) = faulty(&prefetcher, store, 1000, policy);
    let round = Arc::new(std::sync::Barrier::new(2));
    let other = {
        let (prefetcher, round) = (prefetcher.clone(), round.clone());
        std::thread::spawn(move || {
            for _ in 0..5000 {
                round.wait();
                for _ in 0..3 {
                    pump(&prefetcher);
                }
                round.wait();
            }
        })
    };
    for number in 0..5000 {
        let iterator = prefetcher.new_iterator(0);
        let read = prefetcher.stats(None).objects;
        round.wait();
        prefetcher.announce(iterator, &objects(source, [number % 20]));
        round.wait();
        eventually("the object is read", || prefetcher.stats(None).objects > read);
        prefetcher.cancel(iterator);
    }
    other.join().unwrap();
}

#[test]
fn demands_without_a_waiting_caller_are_not_read() {
    let (prefetcher, source, _store) = prefetcher(MIB, 20, 1000);
    for index in 0..10 {
        let (sender, receiver) = oneshot::channel();
        drop(receiver);
        prefetcher.demand(0, source, std::iter::once((&SourceKey::Index(index), Waiter::Local(sender))));
    }
    eventually("all demands are dropped", || {
        prefetcher.stats(None).in_flight == 0 && prefetcher.stats(None).announced == 0
    });
    assert_eq!((prefetcher.stats(None).objects, prefetcher.stats(None).used_bytes), (0, 0));
}

#[test]
fn reads_that_back_off_do_not_count_against_the_limit() {
    let (prefetcher, _, store) = prefetcher(MIB, 20, 1000);
    let policy = Policy { max_in_flight: 4, max_in_flight_cap: None, ..Policy::default() };
    let (faulty, source) = faulty(&prefetcher, store, 1000, policy);
    let client = client_of(&prefetcher, source);
    let backing_off: Vec<_> = (0..3).map(|_| client.permits().back_off()).collect();
    // Three of the limit for read-ahead, one for each request that is backing off, and the client of the other source.
    let others = prefetcher.stats(None).in_flight_limit - 6;
    drop(backing_off);
    assert_eq!(prefetcher.stats(None).in_flight_limit, others + 3);
    faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Throttled); 2]);
    assert!(runtime().block_on(prefetcher.take(0, source, &indices(0..20))).iter().all(Result::is_ok));
    assert_eq!(client.permits().backing_off(), 0);
}

/// Reads 20 objects of 1 MB, drops them, and decides three times, ten seconds apart, whether to release memory. Returns
/// whether their pages remain.
fn remain(is_memory_short: Option<bool>, announced: Range<u64>, with_worker: bool) -> bool {
    let (prefetcher, source, _store) = prefetcher(32 * MIB, 40, 1_000_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let claim = with_worker.then(|| worker.block(1, &[MIB], no_check).unwrap().unwrap());
    drop(runtime().block_on(prefetcher.take(0, source, &indices(0..20))));
    prefetcher.announce(prefetcher.new_iterator(0), &objects(source, announced));
    eventually("no read runs", || prefetcher.stats(None).in_flight == 0);
    for seconds in [10, 20, 30] {
        prefetcher.release_free_memory(Instant::now() + Duration::from_secs(seconds), || is_memory_short);
    }
    drop(claim);
    rustix::fs::fstat(prefetcher.arena().file().get().unwrap()).unwrap().st_blocks > 15_000_000 / 512
}

#[test]
fn pages_are_released_after_an_idle_period_unless_workers_live_and_memory_is_not_short() {
    assert!(!remain(None, 0..0, false));
    assert!(!remain(None, 0..0, true));
    assert!(!remain(Some(false), 0..0, false));
    assert!(remain(Some(false), 0..0, true));
}

#[test]
fn pages_are_released_while_objects_are_announced_if_memory_is_short() {
    assert!(remain(None, 20..21, false));
    assert!(remain(Some(false), 20..21, false));
    assert!(!remain(Some(true), 20..21, false));
    assert!(!remain(Some(true), 20..21, true));
}
