//! Objects that are named one by one.

use super::*;

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
    assert!(matches!(worker.ask(listed, &[2], Ahead::default(), never).unwrap()[..], [Reply::Landed(_)]));
    drop(replies);
    eventually("what was released is free", || prefetcher.stats().memory.used == 0);
}

#[test]
fn what_a_request_by_numbers_announced_is_not_announced_again_by_names_behind_it() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 60, 1000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let [first, second] = [worker.new_iterator(), worker.new_iterator()];
    drop(worker.ask(listed, &[0], Ahead { iterator: first, objects: &[1, 2, 3] }, never).unwrap());
    drop(worker.ask_by_name(source, &[named("k9").to_bytes()], never).unwrap());
    assert_eq!(prefetcher.stats().announced, 3);
    drop(worker.ask(listed, &[], Ahead { iterator: second, objects: &[50, 51] }, never).unwrap());
    worker.end_iterator(first);
    drop(worker.ask_by_name(source, &[named("k9").to_bytes()], never).unwrap());
    // Served behind the one that ended the iterator.
    drop(worker.ask_by_name(source, &[named("k9").to_bytes()], never).unwrap());
    assert_eq!(prefetcher.stats().announced, 2);
}

#[test]
fn clients_of_names_count_in_the_limit_from_when_they_are_made() {
    let store = Arc::new(MemoryStore::new(format!("prefetch-{}", fastrand::u64(..))));
    let faulty = Arc::new(FaultyStore::new(store));
    let policy = Policy { max_in_flight: 16, max_in_flight_cap: None, ..Policy::default() };
    let client = Arc::new(Client::new(faulty.clone(), policy));
    let prefetcher = Prefetcher::start(8 * MIB).unwrap();
    let source = prefetcher.add_names(Arc::new(move |_| Ok(client.clone())));
    let named = |index| ObjectRef::new(format!("memory://m/k{index}"), 0, Some(1000), None, None).unwrap();
    let refs: Vec<ObjectRef> = (0..20).map(named).collect();
    faulty.script(Operation::Get, [Fault::Late(Duration::from_secs(3600)); 12]);
    let iterator = prefetcher.new_iterator();
    assert_eq!(prefetcher.stats().limit, 1);
    prefetcher.announce(iterator, &prefetcher.objects(source, refs.iter()));
    eventually("as many are read as may be", || faulty.pending() == 0);
    assert_eq!((prefetcher.stats().in_flight, prefetcher.stats().limit), (12, 12));
    prefetcher.cancel(iterator);
    prefetcher.remove_source(source);
    assert_eq!(prefetcher.stats().limit, 1);
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
