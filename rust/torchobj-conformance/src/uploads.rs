//! Uploads in parts: complete at the commit, invisible before it, deleted by an abort.

use crate::writes::some_attributes;
use crate::{Subject, get, kind_of, pattern, put};
use torchobj_core::error::ErrorKind;
use torchobj_core::types::{Condition, PutOptions, Version};
use torchobj_core::upload::{Gather, Piece, Writer};

/// A body of two full parts and a smaller one.
fn large(subject: &Subject, seed: u64) -> bytes::Bytes {
    parts(subject, 2, seed)
}

/// A body of `count` full parts and a smaller one.
fn parts(subject: &Subject, count: u64, seed: u64) -> bytes::Bytes {
    let part = subject.policy().part_bytes.max(subject.store().capabilities().min_part_bytes);
    let length = (count * part + 12_345).max(subject.policy().whole_below_bytes);
    pattern(usize::try_from(length).unwrap(), seed)
}

async fn write(writer: &mut Writer, mut bytes: &[u8], piece: usize) {
    while !bytes.is_empty() {
        let count = writer.fill(&bytes[..piece.min(bytes.len())]).unwrap();
        if count < piece.min(bytes.len()) {
            writer.send_part().await.unwrap();
        }
        bytes = &bytes[count..];
    }
}

async fn unfinished(subject: &Subject) -> usize {
    subject.uploads("").await.unwrap().len()
}

pub(super) async fn a_large_put_is_complete(subject: Subject) {
    let body = large(&subject, 1);
    let attributes = subject.store().capabilities().attributes.then(some_attributes).unwrap_or_default();
    let options = PutOptions { attributes: attributes.clone(), ..PutOptions::default() };
    let version = subject.put("large", body.clone().into(), &options).await.unwrap();
    assert!(get(&subject, "large").await.unwrap() == body);
    let head = subject.head("large").await.unwrap();
    assert_eq!((head.size, head.version), (body.len() as u64, Some(version)));
    assert_eq!(head.attributes.metadata, attributes.metadata);
    assert_eq!(unfinished(&subject).await, 0);
}

pub(super) async fn a_writer_makes_an_object_of_the_written_bytes(subject: Subject) {
    for (name, body) in [("small", pattern(1000, 2)), ("large", large(&subject, 3))] {
        let mut writer = Writer::new(subject.clone(), name, PutOptions::default()).unwrap();
        write(&mut writer, &body, 100_003).await;
        assert_eq!(writer.position(), body.len() as u64);
        assert_eq!(kind_of(subject.head(name).await), ErrorKind::NotFound, "visible before its commit");
        let version = writer.close().await.unwrap();
        assert!(get(&subject, name).await.unwrap() == body, "{name}");
        assert_eq!(subject.head(name).await.unwrap().version, Some(version), "{name}");
    }
    assert_eq!(unfinished(&subject).await, 0);
}

pub(super) async fn a_gathered_object_is_complete_with_its_checksums(subject: Subject) {
    for (name, seed, body) in [("small", 4, pattern(9000, 4)), ("large", 5, large(&subject, 5))] {
        let mut gather = Gather::new(subject.clone(), name, PutOptions::default(), None).unwrap();
        let record = body.slice(3..body.len() - 11);
        let pieces = [Piece::Literal(body.slice(..3)), Piece::Record(record.clone()), Piece::Crc32(0..1)];
        gather.write(pieces.to_vec()).await.unwrap();
        let (one, other) = (pattern(70_001, seed), pattern(5, seed));
        gather.write(vec![Piece::Record(one.clone()), Piece::Record(other.clone())]).await.unwrap();
        gather.write(vec![Piece::Crc32(1..3), Piece::Literal(body.slice(body.len() - 11..))]).await.unwrap();
        assert_eq!(kind_of(subject.head(name).await), ErrorKind::NotFound, "visible before its commit");
        let (version, size, crc32) = gather.close().await.unwrap();
        let tail = [&one[..], &other[..]].concat();
        let sums = [&record[..], &tail[..]].map(|bytes| crc_fast::crc32_iso_hdlc(bytes).to_le_bytes());
        let whole = [&body[..body.len() - 11], &sums[0], &tail, &sums[1], &body[body.len() - 11..]].concat();
        assert!(get(&subject, name).await.unwrap() == whole, "{name}");
        assert_eq!(crc32, crc_fast::crc32_iso_hdlc(&whole), "{name}");
        let head = subject.head(name).await.unwrap();
        assert_eq!((head.version, head.size), (Some(version), size), "{name}");
    }
    assert_eq!(unfinished(&subject).await, 0);
}

pub(super) async fn an_aborted_gather_leaves_nothing(subject: Subject) {
    put(&subject, "kept", "before").await;
    let mut gather = Gather::new(subject.clone(), "kept", PutOptions::default(), None).unwrap();
    gather.write(vec![Piece::Record(large(&subject, 6))]).await.unwrap();
    assert!(unfinished(&subject).await == 1 || !subject.store().capabilities().upload_sessions);
    let error = gather.write(vec![Piece::Crc32(1..2)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert_eq!(get(&subject, "kept").await.unwrap(), b"before");
    assert_eq!(unfinished(&subject).await, 0);
}

pub(super) async fn a_writer_without_bytes_makes_an_empty_object(subject: Subject) {
    let mut writer = Writer::new(subject.clone(), "empty", PutOptions::default()).unwrap();
    writer.close().await.unwrap();
    assert_eq!(subject.head("empty").await.unwrap().size, 0);
}

pub(super) async fn an_aborted_writer_leaves_nothing(subject: Subject) {
    put(&subject, "k", "before").await;
    for body in [pattern(1000, 4), parts(&subject, 1, 5)] {
        let mut writer = Writer::new(subject.clone(), "k", PutOptions::default()).unwrap();
        write(&mut writer, &body, 1 << 20).await;
        writer.abort().await;
        assert_eq!(get(&subject, "k").await.unwrap(), b"before");
        assert_eq!(unfinished(&subject).await, 0);
    }
}

pub(super) async fn a_dropped_writer_leaves_nothing(subject: Subject) {
    put(&subject, "k", "before").await;
    let mut writer = Writer::new(subject.clone(), "k", PutOptions::default()).unwrap();
    write(&mut writer, &parts(&subject, 1, 6), 1 << 20).await;
    drop(writer);
    // The abort runs in the background.
    tokio::task::spawn_blocking(|| torchobj_core::runtime::cleaned_up(std::time::Duration::from_secs(20)))
        .await
        .unwrap();
    assert_eq!(unfinished(&subject).await, 0);
    assert_eq!(get(&subject, "k").await.unwrap(), b"before");
}

pub(super) async fn an_upload_replaces_only_at_its_commit(subject: Subject) {
    put(&subject, "k", "before").await;
    let body = large(&subject, 7);
    let mut writer = Writer::new(subject.clone(), "k", PutOptions::default()).unwrap();
    write(&mut writer, &body, 1 << 20).await;
    assert_eq!(get(&subject, "k").await.unwrap(), b"before");
    if subject.store().capabilities().upload_sessions {
        let uploads = subject.uploads("k").await.unwrap();
        assert_eq!(uploads.iter().map(|upload| upload.key.as_str()).collect::<Vec<_>>(), ["k"]);
    }
    assert!(subject.uploads("other").await.unwrap().is_empty());
    writer.close().await.unwrap();
    assert!(get(&subject, "k").await.unwrap() == body);
}

pub(super) async fn a_commit_if_absent_never_replaces(subject: Subject) {
    if !subject.store().capabilities().put_if_absent {
        return;
    }
    let options = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
    let mut writer = Writer::new(subject.clone(), "k", options).unwrap();
    write(&mut writer, &parts(&subject, 1, 8), 1 << 20).await;
    put(&subject, "k", "was first").await;
    assert_eq!(kind_of(writer.close().await), ErrorKind::Precondition);
    assert_eq!(get(&subject, "k").await.unwrap(), b"was first");
    assert_eq!(unfinished(&subject).await, 0);
}

pub(super) async fn a_wrong_part_is_refused_at_the_commit(subject: Subject) {
    let store = subject.store();
    let upload = store.begin_upload("k", &PutOptions::default()).await.unwrap();
    let body = pattern(1000, 9);
    let mut receipt = store.put_part(&upload, 1, 0, &body.clone().into()).await.unwrap();
    let again = store.put_part(&upload, 1, 0, &body.clone().into()).await.unwrap();
    receipt.version = Version::new("\"00000000000000000000000000000000\"");
    assert_eq!(kind_of(store.commit(&upload, &[receipt], &Condition::Always).await), ErrorKind::InvalidRequest);
    assert_eq!(kind_of(subject.head("k").await), ErrorKind::NotFound);
    store.commit(&upload, &[again], &Condition::Always).await.unwrap();
    assert_eq!(get(&subject, "k").await.unwrap(), body);
}

pub(super) async fn an_aborted_upload_accepts_no_parts(subject: Subject) {
    let store = subject.store();
    let upload = store.begin_upload("k", &PutOptions::default()).await.unwrap();
    let part = store.put_part(&upload, 1, 0, &pattern(10, 10).into()).await.unwrap();
    store.abort(&upload).await.unwrap();
    store.abort(&upload).await.expect("aborting an upload that is gone succeeds");
    assert_eq!(kind_of(store.commit(&upload, &[part], &Condition::Always).await), ErrorKind::UploadGone);
    let late = store.put_part(&upload, 2, 10, &pattern(10, 10).into()).await;
    assert_eq!(kind_of(late), ErrorKind::UploadGone);
}
