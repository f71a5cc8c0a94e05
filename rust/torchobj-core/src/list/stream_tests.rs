//! Parallel listings of a store in memory, whose requests take 20 ms of simulated time: the keys, requests and times.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::SizeRange;
use tokio::time::Instant;

use super::{ListOptions, ListStream};
use crate::client::Client;
use crate::error::{ErrorKind, Operation};
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::store::ObjectStore;
use crate::types::{Payload, PutOptions};

/// Of the store in memory.
const PAGE: usize = 100;
const LATENCY: Duration = Duration::from_millis(20);
const MAX_REQUESTS: usize = 10_000;

struct Bucket {
    store: Arc<FaultyStore>,
    client: Arc<Client>,
    keys: BTreeSet<String>,
}

impl Bucket {
    async fn new(keys: impl IntoIterator<Item = String>) -> Self {
        Self::with_faults(keys, vec![Fault::Delay(LATENCY); MAX_REQUESTS]).await
    }

    /// A bucket whose listings have these faults.
    async fn with_faults(keys: impl IntoIterator<Item = String>, faults: Vec<Fault>) -> Self {
        let memory = MemoryStore::new("m");
        let keys: BTreeSet<String> = keys.into_iter().collect();
        for key in &keys {
            memory.put(key, &Payload::default(), &PutOptions::default()).await.unwrap();
        }
        let store = Arc::new(FaultyStore::new(Arc::new(memory)));
        store.script(Operation::List, faults);
        let client = Arc::new(Client::new(store.clone(), Policy::default()));
        Self { store, client, keys }
    }

    /// Lists `prefix`. Returns the number of requests and the time relative to those of a serial listing.
    async fn list(&self, prefix: &str, start_after: Option<&str>, ordered: bool) -> (f64, f64) {
        let (started, before) = (Instant::now(), self.store.pending());
        let mut stream = ListStream::new(
            self.client.clone(),
            prefix,
            ListOptions { start_after, ordered, ..ListOptions::default() },
        );
        let mut listed = Vec::new();
        while let Some(page) = stream.next().await.unwrap() {
            listed.extend(page.entries.into_iter().map(|entry| entry.key));
        }
        let selected = |key: &&String| key.starts_with(prefix) && start_after.is_none_or(|start| key.as_str() > start);
        let expected: Vec<String> = self.keys.iter().filter(selected).cloned().collect();
        if !ordered {
            listed.sort_unstable();
        }
        assert_eq!(listed, expected);
        let pages = expected.len().div_ceil(PAGE).max(1) as f64;
        let requests = (before - self.store.pending()) as f64 / pages;
        (requests, started.elapsed().as_secs_f64() / (pages * LATENCY.as_secs_f64()))
    }
}

/// A pseudo-random number of 64 bits.
fn hash(index: u64) -> u64 {
    let mut state = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        state ^= state >> 29;
        state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    state ^ (state >> 32)
}

fn words(index: u64) -> String {
    let letters = (0..3 + index % 9).map(|letter| char::from(b'a' + (hash(index * 16 + letter) % 26) as u8));
    letters.collect()
}

/// Names and keys of common buckets.
fn buckets() -> Vec<(&'static str, Vec<String>)> {
    let count = 40_000;
    let each = |key: fn(u64) -> String| (0..count).map(key).collect::<Vec<_>>();
    vec![
        ("zero-padded numbers", each(|index| format!("train/{index:012}.jpg"))),
        ("numbers", each(|index| format!("train/img_{index}.png"))),
        ("hashes", each(|index| format!("{:016x}", hash(index)))),
        ("hashes below two characters", each(|index| format!("{:02x}/{:016x}.bin", hash(index) >> 56, hash(index)))),
        ("words", each(|index| format!("{}-{index}", words(index)))),
        (
            "base 62",
            each(|index| {
                let digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz".as_bytes();
                (0..10).map(|digit| char::from(digits[(hash(index * 16 + digit) % 62) as usize])).collect()
            }),
        ),
        ("300 directories", each(|index| format!("run-{:03}/frames/{:06}", index / 130, index % 130))),
        (
            "20 directories with long names",
            each(|index| {
                format!("experiment-{:016x}-of-a-long-name/frames/{:06}.png", hash(index / 2000), index % 2000)
            }),
        ),
        (
            "one hot prefix",
            each(|index| match index {
                0 => "a/first".to_owned(),
                1 => "z/last".to_owned(),
                _ => format!("m/{index:09}"),
            }),
        ),
        (
            "dates",
            each(|index| {
                format!(
                    "logs/{}/{:02}/{:02}/{:06}.gz",
                    2020 + index / 8000,
                    index / 640 % 12 + 1,
                    index / 24 % 28 + 1,
                    index
                )
            }),
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn keys_of_common_forms_are_listed_with_few_requests_in_a_fraction_of_the_time() {
    for (name, keys) in buckets() {
        let bucket = Bucket::new(keys).await;
        for ordered in [true, false] {
            let (requests, time) = bucket.list("", None, ordered).await;
            assert!(requests < 4.0 && time < 0.3, "{name}: {requests:.2}x the requests, {time:.3}x the time");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_listing_of_few_pages_is_not_slower_than_page_after_page() {
    for count in [0, 1, PAGE, PAGE + 1, 3 * PAGE, 10 * PAGE] {
        let bucket = Bucket::new((0..count as u64).map(|index| format!("{:016x}", hash(index)))).await;
        let (requests, time) = bucket.list("", None, true).await;
        assert!(time <= 1.0, "{count} {requests} {time}");
        let extra = (requests - 1.0) * count.div_ceil(PAGE).max(1) as f64;
        assert!(extra <= if count > PAGE { 10.0 } else { 0.0 }, "{count} {extra}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttled_listing_has_fewer_concurrent_requests_and_all_keys() {
    let time = async |fault| {
        let faults = (0..MAX_REQUESTS).map(|index| if index % 2 == 0 { fault } else { Fault::Delay(LATENCY) });
        let keys = (0..20_000).map(|index| format!("{:016x}", hash(index)));
        Bucket::with_faults(keys, faults.collect()).await.list("", None, true).await.1
    };
    let (fast, slow) = (time(Fault::Delay(LATENCY)).await, time(Fault::Fail(ErrorKind::Throttled)).await);
    assert!(slow > 3.0 * fast, "{slow} {fast}");
}

#[tokio::test(start_paused = true)]
async fn the_first_page_sends_one_request() {
    let bucket = Bucket::new((0..10_000).map(|index| format!("{index:06}"))).await;
    let mut stream = ListStream::new(bucket.client.clone(), "", ListOptions::default());
    assert_eq!(stream.next().await.unwrap().unwrap().entries.len(), PAGE);
    assert_eq!(MAX_REQUESTS - bucket.store.pending(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_ignores_the_start_is_listed_page_after_page_from_then_on() {
    for ordered in [true, false] {
        let keys = (0..4000).map(|index| format!("{:016x}", hash(index)));
        let bucket = Bucket::with_faults(keys, vec![Fault::IgnoreStart; MAX_REQUESTS]).await;
        let (first, _) = bucket.list("", None, ordered).await;
        let (second, _) = bucket.list("", None, ordered).await;
        assert!(first > 1.0 && first < 3.0, "{first} requests a page");
        assert!((second - 1.0).abs() < f64::EPSILON, "{second} requests a page");
        bucket.list("", Some("8"), ordered).await;
        bucket.list("f", Some("f8"), ordered).await;
    }
    let keys = (0..1000).map(|index| format!("{index:04}"));
    let bucket = Bucket::with_faults(keys, vec![Fault::IgnoreStart; MAX_REQUESTS]).await;
    bucket.list("", Some("0444"), true).await;
}

#[tokio::test(start_paused = true)]
async fn pages_of_a_slow_caller_do_not_accumulate() {
    let bucket = Bucket::new((0..40_000).map(|index| format!("{:016x}", hash(index)))).await;
    let mut stream = ListStream::new(bucket.client.clone(), "", ListOptions::default());
    for page in 0..20 {
        stream.next().await.unwrap().unwrap();
        tokio::time::sleep(LATENCY * 10).await;
        assert!(MAX_REQUESTS - bucket.store.pending() <= 64 + 32 + 16 + 2 * page);
    }
}

fn arbitrary_keys() -> impl Strategy<Value = BTreeSet<String>> {
    let size = SizeRange::from(0..2000);
    let key = prop_oneof![
        "[ab]{1,10}",
        "[a-c]/[a-c]{1,3}/[0-9]{1,4}",
        "(long/common/prefix/of/many/keys/){0,3}[0-9]{1,5}",
        "\\PC{1,6}",
        "[\u{1}-\u{1f}%+&<>\"' ä日🎉\u{ffff}]{1,4}",
        "[/]{1,5}[0-9a-f]{0,4}",
    ];
    proptest::collection::btree_set(key, size)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn each_key_is_listed_once_and_in_order(
        keys in arbitrary_keys(),
        prefix in prop_oneof![Just(""), Just("a"), Just("long/common/"), Just("b/")],
        start_after in proptest::option::of("[a-l/0-9]{1,3}"),
        ordered in any::<bool>(),
        ignores_start in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let fault = if ignores_start { Fault::IgnoreStart } else { Fault::Delay(LATENCY) };
            let bucket = Bucket::with_faults(keys, vec![fault; MAX_REQUESTS]).await;
            bucket.list(prefix, start_after.as_deref(), ordered).await;
        });
    }
}

/// Characters of keys: control characters, ASCII, of one, two, three and four bytes in UTF-8.
const ALPHABET: [RangeInclusive<char>; 4] =
    ['\u{1}'..='\u{1f}', ' '..='\u{7f}', '\u{80}'..='\u{ffff}', '\u{10000}'..='\u{10ffff}'];

/// 25,000 keys of at most 24 characters of `alphabet`. Half of the keys are in one of 300 directories.
fn many_keys(alphabet: &[char], seed: u64) -> BTreeSet<String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let word = |random: &mut fastrand::Rng, longest: usize| -> String {
        (0..random.usize(1..=longest)).map(|_| alphabet[random.usize(..alphabet.len())]).collect()
    };
    let directories: Vec<_> = (0..300).map(|_| word(&mut random, 8) + "/").collect();
    let mut keys = BTreeSet::new();
    while keys.len() < 25_000 {
        let directory = if random.bool() { directories[random.usize(..300)].as_str() } else { "" };
        keys.insert(format!("{directory}{}", word(&mut random, 24)));
    }
    keys
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 20, ..ProptestConfig::default() })]

    #[test]
    fn each_of_many_keys_is_listed_once_and_in_order(
        alphabet in proptest::collection::vec(proptest::char::ranges(Cow::Borrowed(&ALPHABET)), 2..70),
        seed in any::<u64>(),
        ordered in any::<bool>(),
    ) {
        let alphabet: Vec<_> = alphabet.into_iter().chain(['0', '1']).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            Bucket::new(many_keys(&alphabet, seed)).await.list("", None, ordered).await;
        });
    }
}
