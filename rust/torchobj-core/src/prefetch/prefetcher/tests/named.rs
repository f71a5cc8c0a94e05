//! Objects that are named one by one.

use super::*;

/// The objects of a listed source, named one by one; `key` may include a range: `k3 10..20`.
fn names(prefetcher: &Arc<Prefetcher>, listed: u64) -> (u64, impl Fn(&str) -> Arc<ObjectRef>) {
    let client = client_of(prefetcher, listed);
    let source = prefetcher.add_names(Arc::new(move |name: &ObjectRef| match name.base() {
        "memory://m" => Ok(client.clone()),
        base => Err(Error::new(ErrorKind::Config, Operation::Connect, base, "no such bucket")),
    }));
    let named = |key: &str| {
        let (key, range) = key.split_once(' ').unwrap_or((key, "0.."));
        let (start, end) = range.split_once("..").unwrap();
        let base = if key.starts_with('k') { "memory://m" } else { "memory://other" };
        let end = end.parse().ok();
        Arc::new(ObjectRef::new(format!("{base}/{key}"), start.parse().unwrap(), end, None, None).unwrap())
    };
    (source, named)
}

#[test]
fn named_objects_are_read_ahead_and_ranges_count_by_their_length() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 3, 100_000);
    let (source, named) = names(&prefetcher, listed);
    let refs: Vec<Arc<ObjectRef>> = ["k0", "k1 5..25", "k2 99990..", "k1 5..25", "k1 90000..200000"].map(named).into();
    let iterator = prefetcher.new_iterator(0);
    let objects = prefetcher.objects(source, &keys(&refs));
    assert_eq!(objects[1], objects[3]);
    prefetcher.announce(iterator, &objects);
    let charges = [UNKNOWN_BYTES, 20, UNKNOWN_BYTES, 20, 110_000].map(Arena::charge);
    assert_eq!(prefetcher.pending(iterator), charges.iter().sum::<u64>());
    all_read(&prefetcher, 4);
    let taken = runtime().block_on(prefetcher.take(0, source, &keys(&refs)));
    for (fetched, (byte, len)) in taken.iter().zip([(0, 100_000), (1, 20), (2, 10), (1, 20), (1, 10_000)]) {
        assert!(fetched.as_ref().unwrap().buffer.as_slice() == vec![byte; len]);
    }
    assert_eq!((prefetcher.stats(None).hits, prefetcher.stats(None).misses), (5, 0));
}

#[test]
fn a_worker_requests_objects_by_name_and_each_failure_is_separate() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 3, 1000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = prefetcher.new_iterator(0);
    prefetcher.announce(iterator, &prefetcher.objects(source, &[named("k1 1..4").into()]));
    let requested = ["k0", "k1 1..4", "missing", "k5", "k2 1000..2000"].map(|key| named(key).into());
    let mut replies = worker.request(source, &requested, Announcement::default(), no_check).unwrap();
    replies.extend(worker.request_malformed(source));
    let found: Vec<Result<usize, ErrorKind>> = replies
        .iter()
        .map(|reply| match reply {
            Reply::Claimed(claim) => Ok(claim.buffer().len()),
            Reply::Failed(error) => Err(Error::from_bytes(error).kind()),
        })
        .collect();
    let [config, missing, range] = [ErrorKind::Config, ErrorKind::NotFound, ErrorKind::Range].map(Err);
    assert_eq!(found, [Ok(1000), Ok(3), config, missing, range, config, config]);
    assert_eq!(prefetcher.stats(None).misses, 4);
    // A request by number through the same slot.
    assert!(matches!(
        worker.request(listed, &indices([2]), Announcement::default(), no_check).unwrap()[..],
        [Reply::Claimed(_)]
    ));
    drop(replies);
    eventually("returned segments are free", || prefetcher.stats(None).used_bytes == 0);
}

#[test]
fn a_request_by_name_does_not_repeat_the_previous_announcement() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 60, 1000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let [first, second] = [worker.new_iterator(), worker.new_iterator()];
    drop(
        worker
            .request(listed, &indices([0]), Announcement { iterator: first, objects: &indices([1, 2, 3]) }, no_check)
            .unwrap(),
    );
    drop(worker.request(source, &[named("k9").into()], Announcement::default(), no_check).unwrap());
    assert_eq!(prefetcher.stats(None).announced, 3);
    drop(
        worker.request(listed, &[], Announcement { iterator: second, objects: &indices([50, 51]) }, no_check).unwrap(),
    );
    worker.end_iterator(first);
    drop(worker.request(source, &[named("k9").into()], Announcement::default(), no_check).unwrap());
    // Served after the request that ended the iterator.
    drop(worker.request(source, &[named("k9").into()], Announcement::default(), no_check).unwrap());
    assert_eq!(prefetcher.stats(None).announced, 2);
}

#[test]
fn a_worker_announces_objects_by_name_and_finds_them_read() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 60, 1000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = worker.new_iterator();
    let later = ["k1 1..4", "k2", "k3 5..7"].map(|key| named(key).into());
    let ahead = Announcement { iterator, objects: &later[..] };
    drop(worker.request(source, &[named("k0").into()], ahead, no_check).unwrap());
    all_read(&prefetcher, 4);
    let replies = worker.request(source, &later, Announcement::default(), no_check).unwrap();
    let lengths = replies.iter().map(|reply| match reply {
        Reply::Claimed(claim) => claim.len(),
        Reply::Failed(error) => panic!("{}", Error::from_bytes(error)),
    });
    assert_eq!(lengths.collect::<Vec<_>>(), [3, 1000, 2]);
    assert_eq!(prefetcher.stats(None).hits, 3);
}

#[test]
fn more_names_than_fit_a_request_are_announced_in_several() {
    let (prefetcher, listed, _store) = prefetcher(8 * MIB, 60, 10);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let iterator = worker.new_iterator();
    let records: Vec<SourceKey> = (0..5000).map(|at| named(&format!("k1 {}..10", at % 10)).into()).collect();
    let ahead = Announcement { iterator, objects: &records[2000..] };
    let replies = worker.request(source, &records[..2000], ahead, no_check).unwrap();
    assert_eq!(replies.len(), 2000);
    drop(replies);
    assert_eq!(prefetcher.stats(None).announced, 3000);
}

#[test]
fn clients_of_names_count_in_the_limit_once_created() {
    let store = Arc::new(MemoryStore::new(format!("prefetch-{}", fastrand::u64(..))));
    let faulty = Arc::new(FaultyStore::new(store));
    let policy = Policy { max_in_flight: 16, max_in_flight_cap: None, ..Policy::default() };
    let client = Arc::new(Client::new(faulty.clone(), policy));
    let prefetcher = Prefetcher::start(8 * MIB).unwrap();
    let source = prefetcher.add_names(Arc::new(move |_| Ok(client.clone())));
    let named = |index| Arc::new(ObjectRef::new(format!("memory://m/k{index}"), 0, Some(1000), None, None).unwrap());
    let refs: Vec<Arc<ObjectRef>> = (0..20).map(named).collect();
    faulty.script(Operation::Get, [Fault::Delay(Duration::from_secs(3600)); 12]);
    let iterator = prefetcher.new_iterator(0);
    assert_eq!(prefetcher.stats(None).in_flight_limit, 1);
    prefetcher.announce(iterator, &prefetcher.objects(source, &keys(&refs)));
    eventually("the limit of reads is reached", || faulty.pending() == 0);
    assert_eq!((prefetcher.stats(None).in_flight, prefetcher.stats(None).in_flight_limit), (12, 12));
    prefetcher.cancel(iterator);
    prefetcher.remove_source(source);
    assert_eq!(prefetcher.stats(None).in_flight_limit, 1);
}

#[test]
fn a_batch_of_very_many_names_is_complete() {
    let (prefetcher, listed, _store) = prefetcher(64 * MIB, 1, 66_000);
    let (source, named) = names(&prefetcher, listed);
    // More names than are kept before a sweep. Most are empty ranges, which take no request.
    let length = |start: usize| if start.is_multiple_of(20) { start % 999 } else { 0 };
    let name = |start: usize| named(&format!("k0 {start}..{}", start + length(start)));
    let refs: Vec<Arc<ObjectRef>> = (0..66_000).map(name).collect();
    for names in [&refs[..], &refs[..2000]] {
        let taken = runtime().block_on(prefetcher.take(0, source, &keys(names)));
        assert_eq!(taken.len(), names.len());
        for (start, fetched) in taken.into_iter().enumerate() {
            assert_eq!(fetched.unwrap().buffer.len(), length(start).min(66_000 - start), "{start}");
        }
    }
}

#[test]
fn names_sent_in_several_requests_are_answered_in_order() {
    let (prefetcher, listed, _store) = prefetcher(64 * MIB, 1, 20_000);
    let (source, named) = names(&prefetcher, listed);
    let worker = Arc::new(Worker::inherit(prefetcher.arena()).unwrap());
    let requested: Vec<SourceKey> = (0..5000).map(|end| named(&format!("k0 0..{end}")).into()).collect();
    let long = SourceKey::Ref(named(&format!("k{}", "é".repeat(8000))));
    let replies = worker.request(source, &requested, Announcement::default(), no_check).unwrap();
    assert_eq!(replies.len(), 5000);
    for (len, reply) in replies.iter().enumerate() {
        let Reply::Claimed(claim) = reply else { panic!("{reply:?}") };
        assert_eq!(claim.len(), len as u64);
    }
    let replies =
        worker.request(source, &[long.clone(), requested[9].clone(), long], Announcement::default(), no_check).unwrap();
    assert!(matches!(replies[..], [Reply::Failed(_), Reply::Claimed(_), Reply::Failed(_)]));
}
