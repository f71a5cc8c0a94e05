//! Reads: whole objects, ranges, versions, many objects, and a file-like reader.

use crate::{Subject, get, get_range, kind_of, pattern, put};
use torchobj_core::buffer::{Memory, PendingBuffer, ReceivedBytes};
use torchobj_core::crc32::Crc32;
use torchobj_core::error::ErrorKind;
use torchobj_core::read::{
    ClientRead, ReadAhead, ReadAheadConfig, ReadRequest, ScatterRange, ScatterRead, get_many, scatter, try_get_many,
};
use torchobj_core::types::{ByteRange, Version};

pub(super) async fn a_written_object_is_read(subject: Subject) {
    for length in [1, 2, 4096, 110 << 10, 1 << 20] {
        let body = pattern(length, 1);
        let version = put(&subject, "k", body.clone()).await;
        let fetched = subject.get(ReadRequest::whole("k")).await.unwrap();
        assert_eq!(fetched.buffer.as_slice(), body, "{length}");
        assert_eq!((fetched.size, fetched.version), (length as u64, Some(version)), "{length}");
        let known = ReadRequest { size: Some(length as u64), ..ReadRequest::whole("k") };
        assert_eq!(subject.get(known).await.unwrap().buffer.as_slice(), body, "{length}, known");
    }
}

pub(super) async fn an_empty_object_is_read(subject: Subject) {
    put(&subject, "empty", "").await;
    for size in [None, Some(0)] {
        let fetched = subject.get(ReadRequest { size, ..ReadRequest::whole("empty") }).await.unwrap();
        assert_eq!((fetched.buffer.len(), fetched.size), (0, 0));
    }
    assert_eq!(subject.head("empty").await.unwrap().size, 0);
    assert_eq!(kind_of(get_range(&subject, "empty", 1..2).await), ErrorKind::Range);
}

pub(super) async fn ranges_have_the_requested_bytes(subject: Subject) {
    let body = pattern(1000, 2);
    put(&subject, "k", body.clone()).await;
    for range in [0..1, 0..1000, 10..20, 999..1000, 990..2000, 5..5] {
        let end = range.end.min(1000);
        let expected = &body[usize::try_from(range.start).unwrap()..usize::try_from(end).unwrap()];
        assert_eq!(get_range(&subject, "k", range.clone()).await.unwrap(), expected, "{range:?}");
    }
    for (range, expected) in [
        (ByteRange::From(0), &body[..]),
        (ByteRange::From(999), &body[999..]),
        (ByteRange::Suffix(1), &body[999..]),
        (ByteRange::Suffix(300), &body[700..]),
        (ByteRange::Suffix(5000), &body[..]),
    ] {
        let read = ReadRequest { range: Some(range.clone()), ..ReadRequest::whole("k") };
        assert_eq!(subject.get(read).await.unwrap().buffer.as_slice(), expected, "{range:?}");
    }
    assert_eq!(kind_of(get_range(&subject, "k", 1000..1001).await), ErrorKind::Range);
}

pub(super) async fn a_missing_object_is_not_found(subject: Subject) {
    assert_eq!(kind_of(get(&subject, "missing").await), ErrorKind::NotFound);
    assert_eq!(kind_of(subject.head("missing").await), ErrorKind::NotFound);
    let error = subject.get(ReadRequest::whole("missing")).await.unwrap_err();
    assert!(error.url().ends_with("missing"), "{error}");
}

pub(super) async fn a_read_of_a_replaced_version_fails_as_changed(subject: Subject) {
    let old = put(&subject, "k", pattern(500, 3)).await;
    let pinned = |version: &Version| ReadRequest { version: Some(version.clone()), ..ReadRequest::whole("k") };
    assert_eq!(subject.get(pinned(&old)).await.unwrap().buffer.as_slice(), pattern(500, 3));
    let new = put(&subject, "k", pattern(500, 4)).await;
    assert_ne!(old, new);
    assert_eq!(kind_of(subject.get(pinned(&old)).await), ErrorKind::Changed);
    assert_eq!(subject.get(pinned(&new)).await.unwrap().buffer.as_slice(), pattern(500, 4));
}

pub(super) async fn a_large_object_is_read_in_parts(subject: Subject) {
    let policy = subject.policy();
    for length in [policy.whole_below_bytes, policy.whole_below_bytes + 1, 3 * policy.part_bytes + 17] {
        let body = pattern(usize::try_from(length).unwrap(), length);
        put(&subject, "large", body.clone()).await;
        for size in [None, Some(length)] {
            let fetched = subject.get(ReadRequest { size, ..ReadRequest::whole("large") }).await.unwrap();
            assert!(fetched.buffer.as_slice() == body, "{length} {size:?}");
        }
        let middle = length / 3..length - 5;
        let expected = &body[usize::try_from(middle.start).unwrap()..usize::try_from(middle.end).unwrap()];
        assert!(get_range(&subject, "large", middle).await.unwrap() == expected, "{length}");
    }
}

pub(super) async fn many_objects_are_returned_in_order(subject: Subject) {
    let mut jobs = Vec::new();
    // More than the limit of concurrent requests.
    for index in 0..80_u64 {
        let length = usize::try_from(index * 37).unwrap();
        put(&subject, &format!("k{index}"), pattern(length, index)).await;
        let into = (index % 3 == 0).then(|| Memory::allocate(length + 10).unwrap());
        jobs.push(ClientRead { client: subject.clone(), read: ReadRequest::whole(format!("k{index}")), into });
    }
    for (index, fetched) in try_get_many(jobs).await.unwrap().into_iter().enumerate() {
        assert_eq!(fetched.buffer.as_slice(), pattern(index * 37, index as u64), "{index}");
    }
}

pub(super) async fn one_missing_object_does_not_fail_the_others(subject: Subject) {
    put(&subject, "here", "yes").await;
    let job = |key: &str| ClientRead::new(subject.clone(), ReadRequest::whole(key));
    let results = get_many(vec![job("here"), job("missing"), job("here")]).await;
    let kinds: Vec<_> =
        results.into_iter().map(|result| result.map(|fetched| fetched.size).map_err(|e| e.kind())).collect();
    assert_eq!(kinds, [Ok(3), Err(ErrorKind::NotFound), Ok(3)]);
    assert!(get_many(Vec::new()).await.is_empty());
}

pub(super) async fn a_buffer_that_is_too_small_is_refused(subject: Subject) {
    put(&subject, "k", pattern(100, 5)).await;
    let into = |length| subject.get_into(ReadRequest::whole("k"), Some(Memory::allocate(length).unwrap()));
    let error = into(99).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("99"), "{error}");
    assert_eq!(into(100).await.unwrap().0.buffer.as_slice(), pattern(100, 5));
}

pub(super) async fn a_file_like_reader_reads_the_bytes_of_the_object(subject: Subject) {
    let body = pattern(3 << 20, 6);
    put(&subject, "file", body.clone()).await;
    for window in [
        ReadAheadConfig::default(),
        ReadAheadConfig { jump_bytes: 50_000, ahead_bytes: 0 },
        ReadAheadConfig { jump_bytes: 0, ahead_bytes: 0 },
    ] {
        read_at_random_positions(&subject, &body, window).await;
    }
    put(&subject, "empty", "").await;
    assert_eq!(ReadAhead::new(subject.clone(), "empty", ReadAheadConfig::default()).size().await.unwrap(), 0);
    let missing = ReadAhead::new(subject, "missing", ReadAheadConfig::default()).size().await;
    assert_eq!(kind_of(missing), ErrorKind::NotFound);
}

async fn read_at_random_positions(subject: &Subject, body: &[u8], window: ReadAheadConfig) {
    let mut reader = ReadAhead::new(subject.clone(), "file", window);
    assert_eq!(reader.size().await.unwrap(), body.len() as u64);
    let mut rng = fastrand::Rng::with_seed(11);
    let mut position = 0;
    for step in 0..100 {
        if step % 7 == 0 {
            position = rng.usize(0..body.len() + 100);
        }
        let length = if step % 31 == 0 { 2 << 20 } else { rng.usize(0..100_000) };
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(length).unwrap());
        let count = reader.read_at(position as u64, &mut dest).await.unwrap();
        drop(dest);
        let expected = &body[position.min(body.len())..(position + length).min(body.len())];
        assert_eq!(count, expected.len(), "{position} {length}");
        assert!(pending.finish(count).unwrap().as_slice() == expected, "{position} {length}");
        position += count;
    }
}

pub(super) async fn ranges_of_one_body_are_read_each_into_its_memory(subject: Subject) {
    let body = pattern(1 << 20, 12);
    let version = put(&subject, "k", body.clone()).await;
    let ranges = [400_000..1_000_000, 0..70_000, 70_000..70_001, 70_500..71_000, 80_000..80_000, 100_000..399_999];
    let targets = ranges.iter().map(|range| {
        let memory = Memory::allocate(range.len()).unwrap();
        ScatterRange::new(range.start as u64, memory)
    });
    let (client, key, arrived) = (subject.clone(), "k".to_owned(), ReceivedBytes::default());
    let job = ScatterRead { client, key, version: None, ranges: targets.collect(), arrived: arrived.clone() };
    let scattered = scatter(vec![job], true).await.unwrap().remove(0);
    assert_eq!((scattered.size, scattered.version), (1 << 20, Some(version)));
    assert_eq!(arrived.bytes(), ranges.iter().map(|range| range.len() as u64).sum::<u64>());
    let sums = ranges.map(|range| Crc32::of(&body[range]).value());
    assert_eq!(scattered.crc32, sums);
}

pub(super) async fn head_and_tail_have_size_and_version(subject: Subject) {
    for length in [0, 1, 150, 1000] {
        let body = pattern(length, 13);
        let version = put(&subject, "k", body.clone()).await;
        let ends = subject.get_head_and_tail("k", 100, 70).await.unwrap();
        assert_eq!(ends.head.as_slice(), &body[..length.min(100)], "{length}");
        assert_eq!(ends.tail.as_slice(), &body[length.saturating_sub(70)..], "{length}");
        assert_eq!((ends.size, ends.version), (length as u64, Some(version)), "{length}");
    }
    assert_eq!(kind_of(subject.get_head_and_tail("missing", 100, 70).await), ErrorKind::NotFound);
}
