//! Listings: complete, ordered, selected by prefix and delimiter, in pages.

use crate::{Subject, put};
use torchobj_core::list::Filter;
use torchobj_core::manifest::Manifest;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{ListPage, ListRequest};

async fn pages(subject: &Subject, request: ListRequest<'_>) -> (Vec<String>, Vec<String>, usize) {
    let (mut keys, mut prefixes, mut count) = (Vec::new(), Vec::new(), 0);
    let mut continuation = None;
    loop {
        let request = ListRequest { continuation: continuation.as_deref(), ..request.clone() };
        let ListPage { entries, prefixes: folded, continuation: next } = subject.list(request).await.unwrap();
        keys.extend(entries.into_iter().map(|entry| entry.key));
        prefixes.extend(folded);
        count += 1;
        match next {
            Some(next) => continuation = Some(next),
            None => return (keys, prefixes, count),
        }
    }
}

async fn fill(subject: &Subject, keys: &[String]) {
    let puts = keys.iter().map(|key| put(subject, key, key.clone()));
    futures_util::future::join_all(puts).await;
}

pub(super) async fn all_keys_are_listed_once_and_in_order(subject: Subject) {
    let mut keys: Vec<String> = (0..120).map(|index| format!("many/{index:03}")).collect();
    keys.extend(
        ["many/a b", "many/a+b", "many/a%b", "many/ä", "many/日本", "many/🎉", "many/Z", "many/&<>"].map(String::from),
    );
    fill(&subject, &keys).await;
    keys.sort();
    let request = ListRequest { prefix: "many/", max_entries: Some(20), ..ListRequest::default() };
    let (listed, prefixes, pages) = pages(&subject, request).await;
    assert_eq!(listed, keys);
    assert!(prefixes.is_empty() && pages >= 7, "{prefixes:?} {pages}");
}

pub(super) async fn a_prefix_and_a_delimiter_select(subject: Subject) {
    let keys = ["a/1", "a/2", "a/x/1", "a/x/2", "a/y z/1", "ab/1", "b", "a-1"].map(String::from);
    fill(&subject, &keys).await;
    let select = |prefix, delimiter| ListRequest { prefix, delimiter, ..ListRequest::default() };
    let (listed, prefixes, _) = pages(&subject, select("", Some("/"))).await;
    assert_eq!((listed, prefixes), (strings(["a-1", "b"]), strings(["a/", "ab/"])));
    let (listed, prefixes, _) = pages(&subject, select("a/", Some("/"))).await;
    assert_eq!((listed, prefixes), (strings(["a/1", "a/2"]), strings(["a/x/", "a/y z/"])));
    let (listed, _, _) = pages(&subject, select("a", None)).await;
    assert_eq!(listed, strings(["a-1", "a/1", "a/2", "a/x/1", "a/x/2", "a/y z/1", "ab/1"]));
}

fn strings<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(String::from).into()
}

pub(super) async fn a_listing_begins_after_a_key(subject: Subject) {
    fill(&subject, &["a", "b", "c", "d"].map(String::from)).await;
    let request = ListRequest { start_after: Some("b"), ..ListRequest::default() };
    assert_eq!(pages(&subject, request).await.0, strings(["c", "d"]));
    let request = ListRequest { start_after: Some("bb"), ..ListRequest::default() };
    assert_eq!(pages(&subject, request).await.0, strings(["c", "d"]));
}

pub(super) async fn a_prefix_without_objects_has_an_empty_listing(subject: Subject) {
    let request = ListRequest { prefix: "nothing/here/", ..ListRequest::default() };
    assert_eq!(pages(&subject, request).await, (Vec::new(), Vec::new(), 1));
}

pub(super) async fn a_manifest_has_the_listed_objects(subject: Subject) {
    let keys: Vec<String> = (0..30).map(|index| format!("train/{index:02}.png")).collect();
    fill(&subject, &keys).await;
    put(&subject, "train/labels.csv", "").await;
    let mut manifest = Manifest::default();
    let filter = Filter::new(Some("*.png"), Vec::new(), Some(25)).unwrap();
    subject.list_into(&mut manifest, "x://bucket", "train/", &filter).await.unwrap();
    assert_eq!(manifest.len(), 25);
    for (index, key) in keys.iter().enumerate().take(25) {
        let object = manifest.get(index).unwrap();
        assert_eq!((object.url(), object.size), (format!("x://bucket/{}", key), Some(key.len() as u64)));
        let read = ReadRequest { size: object.size, version: object.version, ..ReadRequest::whole(object.key) };
        assert_eq!(subject.get(read).await.unwrap().buffer.as_slice(), key.as_bytes());
    }
}
