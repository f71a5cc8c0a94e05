//! Bodies that stall or are slow: each read ends with its bytes or with an error.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::client::Client;
use crate::error::{ErrorKind, Operation};
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::read::ReadRequest;
use crate::types::PutOptions;

const SECOND: Duration = Duration::from_secs(1);

/// A client of an object `k` of `size` bytes, whose reads fail by `faults`.
async fn client(policy: Policy, size: usize, faults: impl IntoIterator<Item = Fault>) -> Arc<Client> {
    let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("slow-{}", fastrand::u64(..))))));
    let client = Arc::new(Client::new(faulty.clone(), Policy { hedge: false, ..policy }));
    client.put("k", body(size).into(), &PutOptions::default()).await.unwrap();
    faulty.script(Operation::Get, faults);
    client
}

fn body(size: usize) -> Bytes {
    (0..size).map(|index| index.to_le_bytes()[0]).collect()
}

fn read(size: usize) -> ReadRequest {
    ReadRequest { size: Some(size as u64), ..ReadRequest::whole("k") }
}

#[tokio::test(start_paused = true)]
async fn a_stalled_first_range_is_detected_while_other_parts_arrive() {
    let policy = Policy { part_bytes: 1000, whole_below_bytes: 1000, ..Policy::default() };
    let late = (1..=5).map(|index| Fault::Delay(5 * index * SECOND));
    let client = client(policy, 6000, std::iter::once(Fault::StallBody(10)).chain(late)).await;
    let began = Instant::now();
    let fetched = client.get(read(6000)).await.unwrap();
    assert_eq!(fetched.buffer.as_slice(), body(6000));
    // 20 s of silence, and one backoff.
    assert!(began.elapsed() <= 26 * SECOND, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_continues_on_another_connection() {
    let client = client(Policy::default(), 100_000, [Fault::DripBody(1)]).await;
    let began = Instant::now();
    let fetched = client.get(read(100_000)).await.unwrap();
    assert_eq!(fetched.buffer.as_slice(), body(100_000));
    assert!(began.elapsed() <= 21 * SECOND, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_store_slow_on_every_connection_fails_within_a_bounded_time() {
    for size in [100, 100_000, 32 << 20] {
        let client = client(Policy::default(), size, std::iter::repeat_n(Fault::DripBody(1), 100)).await;
        let began = Instant::now();
        let result = client.get(read(size)).await;
        if size == 100 {
            assert_eq!(result.unwrap().buffer.as_slice(), body(size));
        } else {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            assert!(text.contains("20 bytes in 20 s") && text.contains("min_bytes_per_s=16384"), "{text}");
        }
        assert!(began.elapsed() <= 240 * SECOND, "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn slow_bytes_use_up_no_attempt() {
    // A third of the minimum rate: 24 connections, each of which transfers 100 KiB.
    let size = (24 * 100) << 10;
    let client = client(Policy::default(), size, std::iter::repeat_n(Fault::DripBody(5 << 10), 100)).await;
    assert_eq!(client.get(read(size)).await.unwrap().buffer.as_slice(), body(size));
}

#[tokio::test(start_paused = true)]
async fn a_body_above_the_minimum_rate_or_without_one_is_read_to_its_end() {
    for (bytes_per_s, min_bytes_per_s) in [(17 << 10, 16 << 10), (1, 0)] {
        let policy = Policy { min_bytes_per_s, max_attempts: 1, ..Policy::default() };
        let size = 600 * bytes_per_s;
        let client = client(policy, size, [Fault::DripBody(bytes_per_s)]).await;
        assert_eq!(client.get(read(size)).await.unwrap().buffer.as_slice(), body(size));
    }
}
