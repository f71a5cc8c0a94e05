//! Writes in one request, copies, and deletes.

use crc_fast::{CrcAlgorithm, checksum as crc};

use crate::{Subject, get, kind_of, pattern, put};
use torchobj_core::buffer::{Memory, PendingBuffer};
use torchobj_core::error::ErrorKind;
use torchobj_core::store::ObjectChecksum;
use torchobj_core::types::{Attributes, ByteRange, Condition, GetRequest, Payload, PutOptions};
use torchobj_core::url::ObjectUrl;

fn when(condition: Condition) -> PutOptions {
    PutOptions { condition, ..PutOptions::default() }
}

fn payload(text: &'static str) -> Payload {
    bytes::Bytes::from_static(text.as_bytes()).into()
}

pub(super) fn some_attributes() -> Attributes {
    Attributes {
        content_type: Some("image/png".into()),
        content_encoding: Some("identity".into()),
        content_disposition: Some("attachment; filename=\"x y.png\"".into()),
        content_language: Some("de".into()),
        cache_control: Some("max-age=60".into()),
        storage_class: None,
        metadata: vec![("epoch".into(), "3".into()), ("note".into(), "two  words, and = more".into())],
    }
}

pub(super) async fn a_put_replaces(subject: Subject) {
    let first = put(&subject, "k", "one").await;
    let second = put(&subject, "k", "two").await;
    assert_ne!(first, second);
    assert_eq!(get(&subject, "k").await.unwrap(), b"two");
    let pieces = vec![pattern(10, 1), bytes::Bytes::new(), pattern(7, 2)];
    subject.put("k", Payload::new(pieces.clone()), &PutOptions::default()).await.unwrap();
    assert_eq!(get(&subject, "k").await.unwrap(), pieces.concat());
}

pub(super) async fn attributes_are_stored(subject: Subject) {
    let options = PutOptions { attributes: some_attributes(), ..PutOptions::default() };
    let put = subject.put("k", payload("x"), &options).await;
    if !subject.store().capabilities().attributes {
        assert_eq!(kind_of(put), ErrorKind::Unsupported);
        return;
    }
    put.unwrap();
    let head = subject.head("k").await.unwrap();
    let class = head.attributes.storage_class.clone();
    assert_eq!(head.attributes, Attributes { storage_class: class, ..some_attributes() });
    assert!(head.modified_ms.is_some_and(|modified| modified > 1_700_000_000_000), "{head:?}");
}

pub(super) async fn a_get_has_the_attributes_and_the_checksum_of_the_object(subject: Subject) {
    let attributes = if subject.store().capabilities().attributes { some_attributes() } else { Attributes::default() };
    let body = pattern(10_000, 4);
    let options = PutOptions { attributes, ..PutOptions::default() };
    subject.put("k", body.clone().into(), &options).await.unwrap();
    let attributes = subject.head("k").await.unwrap().attributes;
    for range in [None, Some(ByteRange::Bounded(10..20))] {
        let request = GetRequest { range, ..GetRequest::whole("k") };
        let mut result = subject.store().open(request).await.unwrap();
        let checksum = result.checksum();
        match checksum {
            Some(ObjectChecksum::Crc32(found)) => assert_eq!(u64::from(found), crc(CrcAlgorithm::Crc32IsoHdlc, &body)),
            Some(ObjectChecksum::Crc32C(found)) => assert_eq!(u64::from(found), crc(CrcAlgorithm::Crc32Iscsi, &body)),
            Some(ObjectChecksum::Crc64Nvme(found)) => assert_eq!(found, crc(CrcAlgorithm::Crc64Nvme, &body)),
            Some(ObjectChecksum::Md5(_) | ObjectChecksum::Sha256(_)) | None => {}
        }
        assert_eq!(result.attributes(), attributes);
        // Reading the body changes neither the attributes nor the checksum.
        let length = usize::try_from(result.range().end - result.range().start).unwrap();
        let (_pending, mut dest) = PendingBuffer::new(Memory::allocate(length).unwrap());
        result.read_into(&mut dest).await.unwrap();
        assert_eq!((dest.remaining(), result.attributes(), result.checksum()), (0, attributes.clone(), checksum));
    }
}

pub(super) async fn a_put_if_absent_never_replaces(subject: Subject) {
    let put = subject.put("k", payload("one"), &when(Condition::Absent)).await;
    if !subject.store().capabilities().put_if_absent {
        assert_eq!(kind_of(put), ErrorKind::Unsupported);
        return;
    }
    put.unwrap();
    let again = subject.put("k", payload("two"), &when(Condition::Absent)).await;
    assert_eq!(kind_of(again), ErrorKind::Precondition);
    assert_eq!(get(&subject, "k").await.unwrap(), b"one");
}

pub(super) async fn a_put_if_matches_replaces_only_this_version(subject: Subject) {
    let old = put(&subject, "k", "one").await;
    let replaced = subject.put("k", payload("two"), &when(Condition::Matches(old.clone()))).await;
    if !subject.store().capabilities().put_if_matches {
        assert_eq!(kind_of(replaced), ErrorKind::Unsupported);
        return;
    }
    replaced.unwrap();
    let again = subject.put("k", payload("three"), &when(Condition::Matches(old))).await;
    assert_eq!(kind_of(again), ErrorKind::Precondition);
    assert_eq!(get(&subject, "k").await.unwrap(), b"two");
}

pub(super) async fn one_of_two_conditional_writers_succeeds(subject: Subject) {
    if !subject.store().capabilities().put_if_absent {
        return;
    }
    for round in 0..10 {
        let key = format!("k{round}");
        let options = when(Condition::Absent);
        let (one, two) =
            tokio::join!(subject.put(&key, payload("one"), &options), subject.put(&key, payload("two"), &options));
        assert_ne!(one.is_ok(), two.is_ok(), "{one:?} {two:?}");
        let expected: &[u8] = if one.is_ok() { b"one" } else { b"two" };
        assert_eq!(get(&subject, &key).await.unwrap(), expected);
    }
}

pub(super) async fn a_copy_has_the_same_bytes_and_attributes(subject: Subject) {
    let attributes = if subject.store().capabilities().attributes { some_attributes() } else { Attributes::default() };
    let options = PutOptions { attributes: attributes.clone(), ..PutOptions::default() };
    subject.put("folder/from here", payload("x"), &options).await.unwrap();
    let source = ObjectUrl::parse(&subject.store().url("folder/from here")).unwrap();
    subject.copy(&source, "to+there").await.unwrap();
    assert_eq!(get(&subject, "to+there").await.unwrap(), b"x");
    let copied = subject.head("to+there").await.unwrap().attributes;
    assert_eq!(copied.metadata, attributes.metadata);
    assert_eq!(copied.content_type.is_some(), attributes.content_type.is_some());
    let missing = ObjectUrl::parse(&subject.store().url("missing")).unwrap();
    assert_eq!(kind_of(subject.copy(&missing, "x").await), ErrorKind::NotFound);
    let other_provider = ObjectUrl::parse("elsewhere://b/k").unwrap();
    assert_eq!(kind_of(subject.copy(&other_provider, "x").await), ErrorKind::Unsupported);
}

pub(super) async fn deleted_objects_are_not_found(subject: Subject) {
    let keys: Vec<String> = (0..12).map(|index| format!("folder/a b&{index}<>")).collect();
    for key in &keys {
        put(&subject, key, "x").await;
    }
    let missing = "was never here".to_owned();
    subject.delete(&[keys[0].clone(), missing, keys[1].clone()]).await.unwrap();
    assert_eq!(kind_of(get(&subject, &keys[0]).await), ErrorKind::NotFound);
    assert_eq!(get(&subject, &keys[2]).await.unwrap(), b"x");
    subject.delete(&keys).await.unwrap();
    for key in &keys {
        assert_eq!(kind_of(subject.head(key).await), ErrorKind::NotFound, "{key}");
    }
    subject.delete(&[]).await.unwrap();
}
