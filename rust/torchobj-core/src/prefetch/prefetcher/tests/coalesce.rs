//! Neighbouring ranges of an object, which are read with one request.

use super::*;

/// One object of random bytes, in a store that fails by script, and a source of names over it.
struct Bench {
    prefetcher: Arc<Prefetcher>,
    source: u64,
    faulty: Arc<FaultyStore>,
    body: Bytes,
}

impl Bench {
    fn new(size: usize, budget: u64, policy: Policy) -> Self {
        Self::of(size, Prefetcher::start(budget).unwrap(), policy)
    }

    /// Without a service task, which checks for reads at any time: only `take` starts reads, once all names are demanded.
    fn without_service(size: usize) -> Self {
        Self::of(size, Prefetcher::without_service(16 * MIB).unwrap(), without_hedge())
    }

    fn of(size: usize, prefetcher: Arc<Prefetcher>, policy: Policy) -> Self {
        let mut body = vec![0; size];
        fastrand::Rng::with_seed(5).fill(&mut body);
        let body = Bytes::from(body);
        let store = Arc::new(MemoryStore::new(format!("prefetch-{}", fastrand::u64(..))));
        let faulty = Arc::new(FaultyStore::new(store));
        let client = Arc::new(Client::new(faulty.clone(), policy));
        for key in ["shard", "other"] {
            runtime().block_on(client.put(key, body.clone().into(), &PutOptions::default())).unwrap();
        }
        let source = prefetcher.add_names(Arc::new(move |_| Ok(client.clone())));
        Self { prefetcher, source, faulty, body }
    }

    fn range(&self, start: usize, end: usize) -> Arc<ObjectRef> {
        self.range_of("shard", start, end)
    }

    fn range_of(&self, key: &str, start: usize, end: usize) -> Arc<ObjectRef> {
        let size = Some(self.body.len() as u64);
        Arc::new(ObjectRef::new(format!("memory://m/{key}"), start as u64, Some(end as u64), size, None).unwrap())
    }

    /// Adjacent ranges of `length` bytes.
    fn ranges(&self, count: usize, length: usize) -> Vec<Arc<ObjectRef>> {
        (0..count).map(|index| self.range(index * length, (index + 1) * length)).collect()
    }

    fn announce(&self, names: &[Arc<ObjectRef>]) -> u64 {
        let iterator = self.prefetcher.new_iterator(0);
        let objects = self.prefetcher.objects(self.source, &keys(names));
        self.prefetcher.announce(iterator, &objects);
        iterator
    }

    /// Takes the ranges and compares their bytes. Returns those that failed.
    fn take(&self, names: &[Arc<ObjectRef>]) -> Vec<Error> {
        let taken = runtime().block_on(self.prefetcher.take(0, self.source, &keys(names)));
        assert_eq!(taken.len(), names.len());
        let mut failed = Vec::new();
        for (name, taken) in names.iter().zip(taken) {
            match taken {
                Ok(read) => {
                    let [start, end] = [name.start(), name.end().unwrap_or(u64::MAX).min(self.body.len() as u64)];
                    let expected = &self.body[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()];
                    assert!(read.buffer.as_slice() == expected, "{name:?}");
                }
                Err(error) => failed.push(error),
            }
        }
        failed
    }

    /// Number of GET requests that `run` sends.
    fn requests(&self, run: impl FnOnce()) -> usize {
        self.faulty.script(Operation::Get, [Fault::Delay(Duration::ZERO); 1000]);
        let before = self.faulty.pending();
        run();
        before - self.faulty.pending()
    }

    fn is_idle(&self) {
        eventually("all counters are zero", || {
            let stats = self.prefetcher.stats(None);
            let reserved = self.prefetcher.window().reserved();
            (stats.in_flight, stats.announced, stats.used_bytes, reserved) == (0, 0, 0, 0)
        });
    }
}

fn without_hedge() -> Policy {
    Policy { hedge: false, ..Policy::default() }
}

#[test]
fn adjacent_ranges_take_one_request_and_have_separate_memory() {
    let bench = Bench::new(400 << 10, 8 * MIB, without_hedge());
    let names = bench.ranges(100, 4 << 10);
    let requests = bench.requests(|| {
        bench.announce(&names);
        all_read(&bench.prefetcher, 100);
        assert_eq!(bench.prefetcher.stats(None).used_bytes, 100 * Arena::charge(4 << 10));
        assert!(bench.take(&names[..50]).is_empty());
        assert_eq!(bench.prefetcher.stats(None).used_bytes, 50 * Arena::charge(4 << 10));
        assert!(bench.take(&names[50..]).is_empty());
    });
    // The first reads start while later ranges are still announced.
    assert!(requests <= 3, "{requests} requests");
    let stats = bench.prefetcher.stats(None);
    assert_eq!((stats.hits, stats.objects, stats.bytes, stats.failed), (100, 100, 400 << 10, 0));
    bench.is_idle();
}

#[test]
fn ranges_in_descending_order_take_one_request() {
    let bench = Bench::new(400 << 10, 8 * MIB, without_hedge());
    let mut names = bench.ranges(100, 4 << 10);
    names.reverse();
    let requests = bench.requests(|| {
        bench.announce(&names);
        assert!(bench.take(&names).is_empty());
    });
    // The first reads start while later ranges are still announced.
    assert!(requests <= 3, "{requests} requests");
}

#[test]
fn ranges_in_any_order_take_few_requests() {
    let bench = Bench::new(4 << 20, 32 * MIB, without_hedge());
    let mut names = bench.ranges(1000, 4 << 10);
    for seed in 0..3 {
        fastrand::Rng::with_seed(seed).shuffle(&mut names);
        let requests = bench.requests(|| {
            bench.announce(&names);
            names.chunks(50).for_each(|names| assert!(bench.take(names).is_empty()));
        });
        // Some start before later ranges are announced, and those that are demanded are read without the others.
        assert!(requests <= 200, "{requests} requests");
        bench.is_idle();
    }
    assert_eq!(bench.prefetcher.stats(None).objects, 3000);
}

#[test]
fn ranges_in_any_order_stay_within_the_budget() {
    let bench = Bench::new(8 << 20, 2 * MIB, without_hedge());
    let mut names = bench.ranges(1000, 8_000);
    fastrand::Rng::with_seed(3).shuffle(&mut names);
    bench.announce(&names);
    for names in names.chunks(10) {
        assert!(bench.prefetcher.stats(None).used_bytes <= 2 * MIB);
        assert!(bench.take(names).is_empty());
    }
    let stats = bench.prefetcher.stats(None);
    assert_eq!((stats.over_budget, stats.misses), (0, 0));
    bench.is_idle();
}

#[test]
fn ranges_of_other_objects_versions_and_far_away_ranges_are_separate_requests() {
    let bench = Bench::without_service(4 << 20);
    let whole = Arc::new(ObjectRef::new("memory://m/shard".into(), 0, None, Some(4 << 20), None).unwrap());
    let open = Arc::new(ObjectRef::new("memory://m/shard".into(), 0, Some(50), None, None).unwrap());
    let separate = [
        [bench.range(0, 1000), bench.range_of("other", 1000, 2000)],
        [bench.range(0, 1000), bench.range(1 << 20, (1 << 20) + 1000)],
        [bench.range(0, 1000), bench.range(500, 2000)],
        [bench.range(0, 600 << 10), bench.range(600 << 10, 1200 << 10)],
        [bench.range(10, 10), bench.range(10, 20)],
        [open, bench.range(50, 60)],
    ];
    for names in separate {
        let count = names.iter().filter(|name| name.end() != Some(name.start())).count();
        assert_eq!(bench.requests(|| drop(bench.take(&names))), count, "{names:?}");
    }
    assert_eq!(bench.requests(|| drop(bench.take(&[bench.range(0, 1000), bench.range(5000, 6000)]))), 1);
    assert!(bench.requests(|| drop(bench.take(std::slice::from_ref(&whole)))) <= 2);
}

#[test]
fn demanded_ranges_that_were_not_announced_are_read_together() {
    let bench = Bench::without_service(400 << 10);
    let names = bench.ranges(100, 4 << 10);
    assert_eq!(bench.requests(|| assert!(bench.take(&names).is_empty())), 1);
    assert_eq!(bench.prefetcher.stats(None).misses, 100);
    bench.is_idle();
}

#[test]
fn every_range_has_its_bytes_through_all_failures() {
    // Several at once, because they wait for timeouts and between attempts.
    std::thread::scope(|scope| (0..10).for_each(|seed| drop(scope.spawn(move || read_through_failures(seed)))));
}

fn read_through_failures(seed: u64) {
    let policy = Policy { idle_timeout: Duration::from_millis(50), ..without_hedge() };
    let bench = Bench::new(3_000_000, 2 * MIB, policy);
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..2 {
        let (mut names, mut at) = (Vec::new(), 0);
        while at < bench.body.len() {
            let end = (at + [1, 100, 5_000, 70_000, 200_000][random.usize(..5)]).min(bench.body.len());
            names.push(bench.range(at, end));
            at = end + [0, 0, 512, 4096, 60_000][random.usize(..5)];
        }
        bench.faulty.script(
            Operation::Get,
            [(); 10].map(|()| match random.u8(..5) {
                0 => Fault::Fail(ErrorKind::Server),
                1 => Fault::WrongRange,
                2 => Fault::StallBody(random.usize(..300_000)),
                _ => Fault::CutBody(random.usize(..300_000)),
            }),
        );
        bench.announce(&names);
        for names in names.chunks(7) {
            let failed = bench.take(names);
            assert!(failed.is_empty(), "{failed:?}");
        }
    }
    assert_eq!(bench.prefetcher.stats(None).over_budget, 0);
    bench.is_idle();
}

#[test]
fn a_panic_and_a_range_beyond_the_end_fail_their_own_range_only() {
    let bench = Bench::without_service(40_000);
    let unknown =
        |start, end| Arc::new(ObjectRef::new("memory://m/shard".to_owned(), start, Some(end), None, None).unwrap());
    let names: Vec<_> = (0..6).map(|index| unknown(index * 10_000, index * 10_000 + 10_000)).collect();
    let failed = bench.take(&names);
    assert_eq!(failed.iter().map(Error::kind).collect::<Vec<_>>(), [ErrorKind::Range; 2]);
    assert!(bench.take(&[unknown(30_000, 40_000), unknown(39_999, 50_000)]).is_empty());
    let known = bench.ranges(4, 10_000);
    // The read of all four, and then one of them.
    bench.faulty.script(Operation::Get, [Fault::Panic; 2]);
    assert_eq!(bench.take(&known).len(), 1);
    bench.is_idle();
}

#[test]
fn a_missing_object_fails_all_its_ranges_with_one_request() {
    let bench = Bench::without_service(40_000);
    let names: Vec<_> =
        (0..4).map(|index| bench.range_of("missing", index * 10_000, index * 10_000 + 10_000)).collect();
    let requests = bench.requests(|| {
        let failed = bench.take(&names);
        assert_eq!(failed.iter().map(Error::kind).collect::<Vec<_>>(), [ErrorKind::NotFound; 4]);
    });
    assert_eq!((requests, bench.prefetcher.stats(None).failed), (1, 4));
    bench.is_idle();
}

#[test]
fn a_read_continues_while_one_of_its_ranges_is_needed() {
    let policy = Policy { hedge: false, ..Policy::default() };
    let bench = Bench::new(40_000, 8 * MIB, policy);
    let names = bench.ranges(4, 10_000);
    bench.faulty.script(Operation::Get, [Fault::Delay(Duration::from_millis(300))]);
    let iterator = bench.announce(&names);
    eventually("the read is running", || bench.faulty.pending() == 0);
    let (sender, receiver) = oneshot::channel();
    let key = SourceKey::Ref(names[2].clone());
    bench.prefetcher.demand(0, bench.source, std::iter::once((&key, Waiter::Local(sender))));
    bench.prefetcher.cancel(iterator);
    let read = runtime().block_on(receiver).unwrap().unwrap();
    assert!(read.buffer.as_slice() == &bench.body[20_000..30_000]);
    drop(read);
    bench.is_idle();
    assert_eq!(bench.prefetcher.stats(None).requests.retries, 0);
}

#[test]
fn a_read_ends_when_none_of_its_ranges_is_needed() {
    let bench = Bench::new(40_000, 8 * MIB, without_hedge());
    bench.faulty.script(Operation::Get, [Fault::Delay(Duration::from_secs(3600))]);
    let iterator = bench.announce(&bench.ranges(4, 10_000));
    eventually("the read is running", || bench.faulty.pending() == 0);
    bench.prefetcher.cancel(iterator);
    bench.is_idle();
}

#[test]
fn ranges_that_are_read_together_stay_within_the_budget() {
    let bench = Bench::new(8 << 20, 2 * MIB, without_hedge());
    let names = bench.ranges(1000, 8_000);
    bench.announce(&names);
    for names in names.chunks(10) {
        assert!(bench.prefetcher.stats(None).used_bytes <= 2 * MIB);
        assert!(bench.take(names).is_empty());
    }
    let stats = bench.prefetcher.stats(None);
    assert_eq!((stats.over_budget, stats.misses, stats.objects), (0, 0, 1000));
    bench.is_idle();
}
