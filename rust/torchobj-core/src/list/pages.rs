//! Requests and validates the pages of one listing: repeated keys, repeated tokens and endless empty pages are errors.
//! Discards keys before the start of the listing. Stores no entries.

use std::collections::HashSet;

use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::{ListEntry, ListPage, ListRequest};

/// Maximum number of consecutive pages without a key. S3 returns empty pages for the delete markers of a versioned
/// bucket: 10 000 pages hold 10 million of them.
const MAX_EMPTY_PAGES: usize = 10_000;

/// What is wrong with a listing, and the next step for the user.
type Problem = (String, &'static str);

const REPEATS: &str = "check whether a cache or a proxy before the store repeats pages";

const UNORDERED: &str = "this is a fault of the server: S3 and Google Cloud Storage list keys in the order of their bytes, and only \
    then is a listing known to be complete. Use another server, or name the objects";

/// A listing and its position.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    prefix: String,
    delimiter: Option<String>,
    start_after: Option<String>,
    /// Keys after it are not needed. A continuation token is for the end of its request.
    end: Option<String>,
    continuation: Option<String>,
    ended: bool,
    /// The continuation tokens since the last key of an ordered listing, or all of them.
    tokens: HashSet<String>,
    /// The first keys of the pages of an unordered listing.
    first_keys: HashSet<String>,
    /// Whether the store has listed keys before `start_after`, which were discarded.
    pub(super) ignores_start: bool,
    last_key: Option<String>,
    last_prefix: Option<String>,
    empty_pages: usize,
}

impl Pages {
    /// A listing of the keys that begin with `prefix` and sort after `start_after`. Keys with `delimiter` after the prefix
    /// are grouped into common prefixes.
    pub fn new(prefix: &str, delimiter: Option<&str>, start_after: Option<&str>) -> Self {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let (delimiter, start_after) = (own(delimiter), own(start_after));
        Self { prefix: prefix.to_owned(), delimiter, start_after, ..Self::default() }
    }

    /// Returns whether the last page was returned.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the next page; `None` after the last one.
    ///
    /// # Errors
    /// `NoBucket`, `AccessDenied`, and errors that persist after the retries; `Protocol` if a key is repeated, is out of
    /// order although the store lists in order, or does not begin with the prefix, or if a token is repeated.
    pub async fn next(&mut self, client: &Client) -> Result<Option<ListPage>> {
        self.next_until(client, None).await
    }

    /// Returns the next page; keys after `end` are not needed, and may be among its entries. `None` after the last page.
    ///
    /// # Errors
    /// Those of [`next`](Self::next).
    pub(super) async fn next_until(&mut self, client: &Client, end: Option<&str>) -> Result<Option<ListPage>> {
        if self.ended {
            return Ok(None);
        }
        if self.continuation.is_none() {
            self.end = end.map(str::to_owned);
        }
        let request = ListRequest {
            prefix: &self.prefix,
            delimiter: self.delimiter.as_deref(),
            start_after: self.start_after.as_deref().filter(|_| self.continuation.is_none()),
            end: self.end.as_deref(),
            continuation: self.continuation.as_deref(),
            max_entries: None,
        };
        let mut page = client.list(request).await?;
        let ordered = client.store().capabilities().ordered_listing;
        self.check(&page, ordered).map_err(|problem| refused(client, &self.prefix, problem))?;
        if let Some(start) = &self.start_after {
            if ordered {
                // GCS includes the start key in the listing.
                self.ignores_start |= page.entries.first().is_some_and(|first| first.key < *start);
                page.entries.retain(|entry| entry.key > *start);
                page.prefixes.retain(|prefix| prefix > start || start.starts_with(prefix.as_str()));
            } else {
                page.entries.retain(|entry| entry.key != *start);
            }
        }
        self.ended = page.continuation.is_none();
        self.continuation.clone_from(&page.continuation);
        Ok(Some(page))
    }

    fn check(&mut self, page: &ListPage, ordered: bool) -> Result<(), Problem> {
        let Self { prefix, last_key, last_prefix, .. } = self;
        let keys = page.entries.iter().map(|entry| &entry.key);
        check_order(prefix, last_key, keys, ordered)?;
        check_order(prefix, last_prefix, page.prefixes.iter(), ordered)?;
        if page.entries.is_empty() && page.prefixes.is_empty() {
            self.empty_pages += 1;
        } else {
            self.empty_pages = 0;
        }
        if ordered && !page.entries.is_empty() {
            // Keys ascend, so only pages without keys can be repeated.
            self.tokens.clear();
        }
        if let Some(first) = page.entries.first().filter(|_| !ordered)
            && !self.first_keys.insert(first.key.clone())
        {
            let message = format!("the listing repeats the page that begins with {:?}: it would never end", first.key);
            return Err((message, REPEATS));
        }
        let Some(token) = &page.continuation else { return Ok(()) };
        if !self.tokens.insert(token.clone()) {
            return Err(("the listing repeats a continuation token: it would never end".to_owned(), REPEATS));
        }
        if self.empty_pages >= MAX_EMPTY_PAGES {
            return Err((format!("the listing has {MAX_EMPTY_PAGES} consecutive pages without a key"), REPEATS));
        }
        Ok(())
    }
}

/// Checks that `keys` begin with `prefix` and, if `ordered`, ascend from `last`. Updates `last` to the last of them.
fn check_order<'a>(
    prefix: &str,
    last: &mut Option<String>,
    keys: impl Iterator<Item = &'a String>,
    ordered: bool,
) -> Result<(), Problem> {
    let mut before = last.as_deref();
    let mut end: Option<&String> = None;
    for key in keys {
        if !key.starts_with(prefix) {
            let message = format!("the listing of prefix {prefix:?} has key {key:?}, which does not begin with it");
            return Err((message, "the server ignores the prefix of listings"));
        }
        if let Some(before) = before.filter(|before| key == before || ordered && key.as_str() < *before) {
            // A page that is repeated begins before the end of the last one.
            let is_unordered = key != before && end.is_some();
            return Err((wrong_order(key, before), if is_unordered { UNORDERED } else { REPEATS }));
        }
        before = Some(key);
        end = Some(key);
    }
    if let Some(end) = end {
        *last = Some(end.clone());
    }
    Ok(())
}

fn wrong_order(key: &str, before: &str) -> String {
    format!("the listing has {key:?} after {before:?}: keys must be unique and in order")
}

fn refused(client: &Client, prefix: &str, (message, hint): Problem) -> Error {
    client.store().error(ErrorKind::Protocol, Operation::List, prefix, &message).with_hint(hint)
}

/// Sorts the entries of a store without ordered listings.
///
/// # Errors
/// `Protocol` if a key is repeated.
pub(super) fn sort(client: &Client, prefix: &str, entries: &mut [ListEntry]) -> Result<()> {
    entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
    match entries.windows(2).find(|pair| pair[0].key == pair[1].key) {
        Some(pair) => Err(refused(client, prefix, (wrong_order(&pair[1].key, &pair[0].key), REPEATS))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::faulty_store::FaultyStore;
    use crate::list::{Filter, ManifestListing};
    use crate::manifest::Manifest;
    use crate::memory::MemoryStore;
    use crate::policy::Policy;

    /// A client whose listing pages are returned by `page`, called with the page number from 0 and the request.
    fn client(ordered: bool, page: impl FnMut(usize, &ListRequest<'_>) -> ListPage + Send + 'static) -> Arc<Client> {
        let faulty = FaultyStore::new(Arc::new(MemoryStore::new("m")));
        faulty.list_by(ordered, page);
        Arc::new(Client::new(Arc::new(faulty), Policy::default()))
    }

    fn page(keys: &[&str], continuation: Option<&str>) -> ListPage {
        let entry = |key: &&str| ListEntry {
            key: (*key).to_owned(),
            size: Some(1),
            version: None,
            modified_ms: None,
            storage_class: None,
        };
        let continuation = continuation.map(str::to_owned);
        ListPage { entries: keys.iter().map(entry).collect(), prefixes: Vec::new(), continuation }
    }

    /// A listing of two pages.
    fn two_pages(ordered: bool, first: &'static [&str], second: &'static [&str]) -> Arc<Client> {
        client(ordered, move |number, _| if number == 0 { page(first, Some("t")) } else { page(second, None) })
    }

    async fn listed(client: &Arc<Client>, limit: Option<usize>) -> Result<Vec<String>> {
        let mut manifest = Manifest::default();
        let filter = Filter::new(None, Vec::new(), limit).unwrap();
        client.list_into(&mut manifest, "m://m", "", &filter).await?;
        Ok((0..manifest.len()).map(|index| manifest.get(index).unwrap().key.to_owned()).collect())
    }

    #[tokio::test]
    async fn repeated_or_unordered_keys_are_an_error_that_names_both() {
        for (first, second, names) in [
            (&["a", "b"][..], &["b", "c"][..], ["\"b\"", "\"b\""]),
            (&["a", "a"], &["b"], ["\"a\"", "\"a\""]),
            (&["b", "d"], &["c"], ["\"c\"", "\"d\""]),
            (&["b", "a"], &[], ["\"a\"", "\"b\""]),
        ] {
            let error = listed(&two_pages(true, first, second), None).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let text = error.to_string();
            assert!(text.contains(&format!("{} after {}", names[0], names[1])), "{text}");
        }
        let keys = listed(&two_pages(true, &["a", "b"], &["c", "ä"]), None).await.unwrap();
        assert_eq!(keys, ["a", "b", "c", "ä"]);
    }

    #[tokio::test]
    async fn a_page_in_another_order_is_a_fault_of_the_server_and_a_repeated_page_may_be_of_a_proxy() {
        for (first, second, is_of_server) in [
            (&["b", "a"][..], &[][..], true),
            (&["a"], &["c", "b"], true),
            (&["b", "d"], &["b", "c"], false),
            (&["a", "a"], &[], false),
        ] {
            let text = listed(&two_pages(true, first, second), None).await.unwrap_err().to_string();
            assert_eq!((text.contains("fault of the server"), text.contains("a proxy")), (is_of_server, !is_of_server));
        }
    }

    #[tokio::test]
    async fn an_unordered_listing_is_sorted_and_has_each_key_once() {
        let client = || two_pages(false, &["d", "b"], &["c", "a"]);
        assert_eq!(listed(&client(), None).await.unwrap(), ["a", "b", "c", "d"]);
        assert_eq!(listed(&client(), Some(2)).await.unwrap(), ["a", "b"]);
        let error = listed(&two_pages(false, &["d", "b"], &["a", "d"]), None).await.unwrap_err();
        assert!(error.to_string().contains("\"d\" after \"d\""), "{error}");
        // `list_page_into` gives the same order.
        let (client, filter, mut manifest) = (client(), Filter::default(), Manifest::default());
        let mut listed = ManifestListing::new(&client, "", &filter);
        while client.list_page_into(&mut manifest, "m://m", &filter, &mut listed).await.unwrap() {}
        assert_eq!((0..4).map(|index| manifest.get(index).unwrap().key).collect::<String>(), "abcd");
    }

    #[tokio::test]
    async fn a_listed_start_key_is_dropped() {
        let client = client(true, |_, request| {
            assert_eq!(request.start_after, Some("b"));
            page(&["b", "c"], None)
        });
        let listed = Pages::new("", None, Some("b")).next(&client).await.unwrap().unwrap();
        assert_eq!(listed.entries.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>(), ["c"]);
    }

    #[tokio::test]
    async fn keys_before_the_start_are_dropped() {
        let client = client(true, |number, _| match number {
            0 => ListPage { prefixes: vec!["a/".to_owned(), "b/".to_owned()], ..page(&["a", "b/"], Some("t")) },
            _ => ListPage { prefixes: vec!["c/".to_owned()], ..page(&["b/1", "b/2"], None) },
        });
        let mut pages = Pages::new("", Some("/"), Some("b/1"));
        let first = pages.next(&client).await.unwrap().unwrap();
        assert_eq!((first.entries.len(), first.prefixes), (0, vec!["b/".to_owned()]));
        let second = pages.next(&client).await.unwrap().unwrap();
        assert_eq!((second.entries[0].key.as_str(), second.entries.len()), ("b/2", 1));
    }

    #[tokio::test]
    async fn a_key_outside_of_the_prefix_is_an_error() {
        let client = client(true, |_, _| page(&["other/a"], None));
        let error = Pages::new("mine/", None, None).next(&client).await.unwrap_err();
        assert!(error.to_string().contains("\"mine/\"") && error.to_string().contains("\"other/a\""), "{error}");
    }

    /// Returns the number of pages before the listing ends with an error.
    async fn pages_until_refused(client: &Client, delimiter: Option<&str>) -> usize {
        let (mut pages, mut count) = (Pages::new("", delimiter, None), 0);
        loop {
            match pages.next(client).await {
                Ok(Some(_)) => count += 1,
                Ok(None) => panic!("it ended after {count} pages"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                    return count;
                }
            }
        }
    }

    #[tokio::test]
    async fn a_listing_that_repeats_itself_or_never_ends_is_an_error() {
        for ordered in [true, false] {
            let same = client(ordered, |_, _| page(&["a"], Some("t")));
            assert_eq!(pages_until_refused(&same, None).await, 1);
            let tokens = ["t", "u", "v"];
            let circle = client(ordered, move |number, _| page(&[], Some(tokens[number % 3])));
            assert_eq!(pages_until_refused(&circle, None).await, 3);
            let folders = client(ordered, |number, _| ListPage {
                prefixes: vec!["a/".to_owned()],
                ..page(&[], Some(&number.to_string()))
            });
            assert_eq!(pages_until_refused(&folders, Some("/")).await, 1);
            let pair = client(ordered, |number, _| page(&["a", "b"], Some(&number.to_string())));
            assert_eq!(pages_until_refused(&pair, None).await, 1);
            let empty = client(ordered, |number, _| page(&[], Some(&number.to_string())));
            assert_eq!(pages_until_refused(&empty, None).await, MAX_EMPTY_PAGES - 1);
        }
    }

    #[tokio::test]
    async fn empty_pages_before_a_key_are_skipped() {
        let client = client(true, |number, _| match number {
            0..1000 => page(&[], Some(&number.to_string())),
            _ => page(&["a"], None),
        });
        assert_eq!(listed(&client, None).await.unwrap(), ["a"]);
    }
}
