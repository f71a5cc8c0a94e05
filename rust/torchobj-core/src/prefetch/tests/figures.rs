//! What a prefetcher says of itself: why reads end without another, how long askers wait, who holds the memory.

use super::*;

/// A prefetcher over what `store` has, `count` objects of `size` bytes, that makes 12 announced reads at a time.
fn over(store: Arc<FaultyStore>, count: u64, size: u64) -> (Arc<Prefetcher>, u64) {
    let policy = Policy { max_in_flight: 16, max_in_flight_cap: None, ..Policy::default() };
    let client = Arc::new(Client::new(store, policy));
    let mut manifest = Manifest::default();
    (0..count).for_each(|index| manifest.push("memory://m", &format!("k{index}"), Some(size), None));
    let prefetcher = Prefetcher::start(8 * MIB).unwrap();
    let source = prefetcher.add_source(Source { manifest: Arc::new(manifest), clients: vec![client] });
    (prefetcher, source)
}

#[test]
fn reads_that_ended_for_want_of_memory_are_counted_once_each_whatever_is_announced() {
    let (prefetcher, source, _store) = prefetcher(2 * MIB, 64, 200_000);
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..64));
    eventually("the budget is used up", || prefetcher.stats().in_flight == 0 && prefetcher.stats().starved > 0);
    let before = prefetcher.stats();
    assert!(before.starved <= before.objects, "{before:?}");
    for _ in 0..100 {
        prefetcher.announce(iterator, &[]);
        prefetcher.cancel(prefetcher.new_iterator());
    }
    let after = prefetcher.stats();
    assert_eq!((after.starved, after.limited, after.objects), (before.starved, 0, before.objects));
}

#[test]
fn reads_that_ended_while_as_many_were_in_flight_as_may_be_are_counted_once_each() {
    let (_, _, store) = prefetcher(MIB, 200, 1000);
    let (prefetcher, source) = over(Arc::new(FaultyStore::new(store)), 200, 1000);
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..200));
    eventually("all is read", || prefetcher.stats().objects == 200 && prefetcher.stats().in_flight == 0);
    let stats = prefetcher.stats();
    assert!((1..=200).contains(&stats.limited) && stats.starved == 0, "{stats:?}");
}

#[test]
fn how_long_a_worker_and_this_process_waited_is_the_sum_of_their_requests() {
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let faulty = Arc::new(FaultyStore::new(store));
    let (prefetcher, source) = over(faulty.clone(), 20, 1000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let late = Duration::from_millis(200);
    faulty.script(Operation::Get, [Fault::Late(late); 2]);
    let ahead = Ahead { iterator: worker.new_iterator(), objects: &[0, 1] };
    drop(worker.ask(source, &[], ahead, never).unwrap());
    eventually("all is read", || prefetcher.stats().objects == 2);
    assert_eq!(prefetcher.stats().waited, Duration::ZERO, "nobody asked");
    drop(worker.ask(source, &[0, 1], Ahead::default(), never).unwrap());
    assert!(prefetcher.stats().waited < late, "both were there");
    faulty.script(Operation::Get, [Fault::Late(late); 8]);
    for asked in [2, 4] {
        drop(worker.ask(source, &[asked, asked + 1], Ahead::default(), never).unwrap());
        drop(runtime().block_on(prefetcher.take(&objects(source, [asked + 10, asked + 11]))));
    }
    // Two objects of one request are one wait.
    let waited = prefetcher.stats().waited;
    assert!((4 * late..8 * late).contains(&waited), "{waited:?}");
}

#[test]
fn memory_is_ahead_with_a_worker_or_with_this_process() {
    let (prefetcher, source, _store) = prefetcher(8 * MIB, 12, 100_000);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..12));
    eventually("all is read", || prefetcher.stats().objects == 12 && prefetcher.stats().in_flight == 0);
    let figures = || {
        let Stats { memory, ahead, .. } = prefetcher.stats();
        [ahead, memory.granted, memory.used - memory.granted - ahead].map(|bytes| bytes / Arena::charge(100_000))
    };
    assert_eq!(figures(), [12, 0, 0]);
    let claimed = worker.ask(source, &[0, 1, 2], Ahead::default(), never).unwrap();
    let held = runtime().block_on(prefetcher.take(&objects(source, [3, 4])));
    assert_eq!(figures(), [7, 3, 2]);
    drop(held);
    drop(claimed);
    prefetcher.cancel(iterator);
    eventually("all is free", || prefetcher.stats().memory.used == 0);
    assert_eq!(figures(), [0, 0, 0]);
}
