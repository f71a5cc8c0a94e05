//! Keys: each is stored unchanged or refused, and different keys are different objects.

use crate::{Subject, get, kind_of, put};
use torchobj_core::error::{ErrorKind, Operation};
use torchobj_core::manifest::Manifest;
use torchobj_core::types::PutOptions;

/// Keys that have caused failures of clients and servers.
fn unusual_keys() -> Vec<String> {
    let mut keys: Vec<String> = [
        "plain",
        "a b",
        " lead",
        "trail ",
        "a+b",
        "a%20b",
        "%41",
        "%",
        "a?b=c",
        "#",
        "a&b",
        "a=b",
        "a;b",
        "a:b",
        "quote'\"<>&",
        "back\\slash",
        "*",
        "(x)",
        "[x]",
        "{x}",
        "~",
        "a,b",
        "$",
        "!",
        "@",
        "|",
        "^",
        "`",
        "tab\there",
        "ä/ö/ü",
        "日本/語",
        "🎉/🎊",
        "e\u{301}",
        "é",
        "a//b",
        "/lead",
        "//",
        "trail/",
        "a/",
        ".",
        "..",
        "../up",
        "in/../side",
        "./here",
        "in/./side",
        "end/..",
        "...",
        ".hidden",
        "A",
        "a",
    ]
    .map(String::from)
    .into();
    keys.push("n".repeat(255));
    keys.push(format!("deep/{}", ["x".repeat(99).as_str(); 10].join("/")));
    keys.push("k".repeat(1024));
    keys.push("é".repeat(512));
    keys
}

pub(super) async fn every_key_is_stored_unchanged_or_refused(subject: Subject) {
    for key in unusual_keys() {
        let body = format!("body of {key}");
        let put = subject.put(&key, body.clone().into_bytes().into_payload(), &PutOptions::default()).await;
        if subject.store().check_key(Operation::Put, &key).is_err() {
            assert_eq!(kind_of(put), ErrorKind::InvalidKey, "put {key:?}");
            assert_eq!(kind_of(get(&subject, &key).await), ErrorKind::InvalidKey, "get {key:?}");
            assert_eq!(kind_of(subject.head(&key).await), ErrorKind::InvalidKey, "head {key:?}");
            continue;
        }
        put.unwrap_or_else(|error| panic!("put {key:?}: {error}"));
        assert_eq!(get(&subject, &key).await.unwrap(), body.as_bytes(), "get {key:?}");
        assert_eq!(subject.head(&key).await.unwrap().size, body.len() as u64, "head {key:?}");
        let mut manifest = Manifest::default();
        subject.list_into(&mut manifest, "x://b", "", &torchobj_core::list::Filter::default()).await.unwrap();
        let listed: Vec<_> = (0..manifest.len()).filter_map(|index| manifest.get(index)).collect();
        assert_eq!(listed.iter().map(|object| &object.key).collect::<Vec<_>>(), [key.as_str()], "list {key:?}");
        subject.delete(std::slice::from_ref(&key)).await.unwrap_or_else(|error| panic!("delete {key:?}: {error}"));
        assert_eq!(kind_of(get(&subject, &key).await), ErrorKind::NotFound, "get deleted {key:?}");
    }
    for key in [String::new(), "k".repeat(1025)] {
        let put = subject.put(&key, b"x".to_vec().into_payload(), &PutOptions::default()).await;
        assert_eq!(kind_of(put), ErrorKind::InvalidKey, "put {key:?}");
    }
}

pub(super) async fn different_keys_are_different_objects(subject: Subject) {
    let rules = subject.store().capabilities().keys;
    let similar = ["a/b", "a//b", "a///b", "/a/b", "a/b/", "a/./b", "x/../a/b", "a%2Fb", "A/b", "a+b", "a b", "a%20b"];
    let keys: Vec<&str> = similar.into_iter().filter(|key| rules.refusal(key).is_none()).collect();
    for key in &keys {
        put(&subject, key, format!("body of {key}")).await;
    }
    for key in keys {
        assert_eq!(get(&subject, key).await.unwrap(), format!("body of {key}").as_bytes(), "{key:?}");
    }
}

/// Converts bytes to a payload.
trait IntoPayload {
    fn into_payload(self) -> torchobj_core::types::Payload;
}

impl IntoPayload for Vec<u8> {
    fn into_payload(self) -> torchobj_core::types::Payload {
        bytes::Bytes::from(self).into()
    }
}
