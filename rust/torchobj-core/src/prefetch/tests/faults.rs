//! What breaks beside a prefetcher, and what nobody waits for any more: it ends, and nothing of it is left.

use super::*;

/// Another source of the same objects, over a store that fails by script.
fn faulty(prefetcher: &Prefetcher, store: Arc<MemoryStore>, size: u64, policy: Policy) -> (Arc<FaultyStore>, u64) {
    let faulty = Arc::new(FaultyStore::new(store));
    let client = Arc::new(Client::new(faulty.clone(), policy));
    let mut manifest = Manifest::default();
    (0..20).for_each(|index| manifest.push("memory://m", &format!("k{index}"), Some(size), None));
    let source = prefetcher.add_source(Source { manifest: Arc::new(manifest), clients: vec![client] });
    (faulty, source)
}

#[test]
fn a_read_that_panics_is_an_error_for_who_waits_and_stops_no_other() {
    let (prefetcher, _, store) = prefetcher(MIB, 20, 1000);
    let (faulty, source) = faulty(&prefetcher, store, 1000, Policy::default());
    faulty.script(Operation::Get, [Fault::Panic; 3]);
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &objects(source, 0..10));
    let taken = runtime().block_on(prefetcher.take(&objects(source, 0..20)));
    let failed: Vec<_> = taken.iter().filter_map(|landed| landed.as_ref().err()).collect();
    assert_eq!(failed.len(), 3);
    assert!(failed.iter().all(|error| error.to_string().contains("panicked: a bug")));
    drop(taken);
    eventually("nothing is counted any more", || {
        let stats = prefetcher.stats();
        (stats.in_flight, stats.announced, stats.memory.used, prefetcher.window().reserved()) == (0, 0, 0, 0)
    });
}

#[test]
fn a_size_that_no_object_has_stops_nothing() {
    let (prefetcher, right, store) = prefetcher(MIB, 20, 1000);
    let (_, wrong) = faulty(&prefetcher, store, u64::MAX, Policy::default());
    let iterator = prefetcher.new_iterator();
    prefetcher.announce(iterator, &[objects(wrong, 0..20), objects(right, 0..20)].concat());
    assert_eq!(runtime().block_on(prefetcher.take(&objects(wrong, 0..20))).len(), 20);
    assert!(runtime().block_on(prefetcher.take(&objects(right, 0..20))).iter().all(Result::is_ok));
    eventually("nothing is reserved any more", || prefetcher.window().reserved() == 0);
}

#[test]
fn what_is_announced_while_another_thread_looks_for_work_is_read_at_once() {
    // Nothing looks for work from time to time here: a read that is not begun at once never is.
    let (_, _, store) = prefetcher(MIB, 20, 1000);
    let prefetcher = Prefetcher::unserved(MIB).unwrap();
    let policy = Policy { max_in_flight: 1, max_in_flight_cap: None, ..Policy::default() };
    let (_, source) = faulty(&prefetcher, store, 1000, policy);
    let round = Arc::new(std::sync::Barrier::new(2));
    let other = {
        let (prefetcher, round) = (prefetcher.clone(), round.clone());
        std::thread::spawn(move || {
            for _ in 0..5000 {
                round.wait();
                for _ in 0..3 {
                    prefetcher.pump();
                }
                round.wait();
            }
        })
    };
    for number in 0..5000 {
        let iterator = prefetcher.new_iterator();
        let read = prefetcher.stats().objects;
        round.wait();
        prefetcher.announce(iterator, &objects(source, [number % 20]));
        round.wait();
        eventually("it is read", || prefetcher.stats().objects > read);
        prefetcher.cancel(iterator);
    }
    other.join().unwrap();
}

#[test]
fn wishes_that_nobody_waits_for_any_more_are_not_read() {
    let (prefetcher, source, _store) = prefetcher(MIB, 20, 1000);
    for index in 0..10 {
        let (sender, receiver) = oneshot::channel();
        drop(receiver);
        prefetcher.wish(std::iter::once((Wanted::Number(Object { source, index }), Wish::Local(sender))));
    }
    eventually("all are given up", || prefetcher.stats().in_flight == 0 && prefetcher.stats().announced == 0);
    assert_eq!((prefetcher.stats().objects, prefetcher.stats().memory.used), (0, 0));
}

#[test]
fn reads_that_wait_to_be_tried_again_leave_their_place_to_others() {
    let (prefetcher, _, store) = prefetcher(MIB, 20, 1000);
    let policy = Policy { max_in_flight: 4, max_in_flight_cap: None, ..Policy::default() };
    let (faulty, source) = faulty(&prefetcher, store, 1000, policy);
    let client = client_of(&prefetcher, source);
    let resting: Vec<_> = (0..3).map(|_| client.permits().rest()).collect();
    // Three ahead of who waits, and one for each that rests; and the client of the other source.
    let others = prefetcher.stats().limit - 6;
    drop(resting);
    assert_eq!(prefetcher.stats().limit, others + 3);
    faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Throttled); 2]);
    assert!(runtime().block_on(prefetcher.take(&objects(source, 0..20))).iter().all(Result::is_ok));
    assert_eq!(client.permits().resting(), 0);
}

#[test]
fn memory_goes_back_to_the_system_when_nothing_is_read_for_a_while() {
    let (prefetcher, source, _store) = prefetcher(32 * MIB, 20, 1_000_000);
    let blocks = || rustix::fs::fstat(prefetcher.arena().file()).unwrap().st_blocks;
    let bare = blocks();
    drop(runtime().block_on(prefetcher.take(&objects(source, 0..20))));
    eventually("all is free", || prefetcher.stats().memory.used == 0 && prefetcher.stats().in_flight == 0);
    let warm = blocks();
    assert!(warm > bare + 19_000_000 / 512);
    prefetcher.rest(Instant::now());
    assert_eq!(blocks(), warm);
    prefetcher.rest(Instant::now() + Duration::from_secs(60));
    assert!(blocks() < bare + 1_000_000 / 512, "{} of {warm} blocks are left", blocks());
}
