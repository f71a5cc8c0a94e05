//! Lists a prefix into a manifest, keeping what a filter lets pass. `pages` validates pages.

mod pages;

use std::time::Duration;

use globset::{GlobBuilder, GlobMatcher};
use tokio::time::Instant;

use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::manifest::Manifest;
use crate::types::ListEntry;

pub use self::pages::Pages;

/// A listing that takes longer than this says in the log how far it is, as often.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Which objects of a listing are wanted. Directory markers, empty objects whose keys end in `/`, never are.
#[derive(Debug, Default)]
pub struct Filter {
    glob: Option<GlobMatcher>,
    suffixes: Vec<String>,
    limit: Option<usize>,
}

impl Filter {
    /// `glob` is matched with what follows the prefix: `*` and `?` stay within a component, `**` does not. A key must
    /// end in one of `suffixes`, if there are any. At most `limit` objects are taken, the first in key order.
    ///
    /// # Errors
    /// `Config` when `glob` is no pattern.
    pub fn new(glob: Option<&str>, suffixes: Vec<String>, limit: Option<usize>) -> Result<Self> {
        let compile = |pattern: &str| {
            let glob = GlobBuilder::new(pattern).literal_separator(true).build().map_err(|source| {
                Error::new(ErrorKind::Config, Operation::List, format!("glob={pattern:?}"), "not a pattern")
                    .with_source(source)
            })?;
            Ok(glob.compile_matcher())
        };
        Ok(Self { glob: glob.map(compile).transpose()?, suffixes, limit })
    }

    fn passes(&self, prefix: &str, entry: &ListEntry) -> bool {
        let marker = entry.size == Some(0) && entry.key.ends_with('/');
        let suffix = self.suffixes.is_empty() || self.suffixes.iter().any(|suffix| entry.key.ends_with(suffix));
        let relative = entry.key.strip_prefix(prefix).unwrap_or(&entry.key);
        !marker && suffix && self.glob.as_ref().is_none_or(|glob| glob.is_match(relative))
    }
}

/// How far a listing into a manifest is.
#[derive(Debug)]
pub struct Listed {
    pages: Pages,
    prefix: String,
    /// Objects that the filter let pass.
    taken: usize,
    seen: usize,
    started: Instant,
    reported: Instant,
}

impl Listed {
    /// Before the first page of what is under `prefix`.
    pub fn new(prefix: &str) -> Self {
        let now = Instant::now();
        let pages = Pages::new(prefix, None, None);
        Self { pages, prefix: prefix.to_owned(), taken: 0, seen: 0, started: now, reported: now }
    }

    /// The entries of the next page that `filter` lets pass.
    async fn page(&mut self, client: &Client, filter: &Filter) -> Result<Vec<ListEntry>> {
        let Some(mut page) = self.pages.next(client).await? else { return Ok(Vec::new()) };
        self.seen += page.entries.len();
        if self.reported.elapsed() >= REPORT_EVERY {
            self.reported = Instant::now();
            let seconds = self.started.elapsed().as_secs_f64();
            log::info!("listing {}: {} keys after {seconds:.1} s", client.store().url(&self.prefix), self.seen);
        }
        page.entries.retain(|entry| filter.passes(&self.prefix, entry));
        Ok(page.entries)
    }
}

impl Client {
    /// Lists everything under `prefix` that `filter` lets pass, in key order. `base` is what the manifest calls this
    /// bucket.
    ///
    /// # Errors
    /// Those of [`Pages::next`].
    pub async fn list_into(&self, manifest: &mut Manifest, base: &str, prefix: &str, filter: &Filter) -> Result<()> {
        let mut listed = Listed::new(prefix);
        while self.list_page_into(manifest, base, filter, &mut listed).await? {}
        manifest.shrink();
        Ok(())
    }

    /// The next page of a listing as `list_into` makes; returns whether there are more. A store that lists in no order
    /// gives one page, of everything: its order is that of the keys on every rank and in every epoch.
    ///
    /// # Errors
    /// As `list_into`.
    pub async fn list_page_into(
        &self,
        manifest: &mut Manifest,
        base: &str,
        filter: &Filter,
        listed: &mut Listed,
    ) -> Result<bool> {
        let mut entries = listed.page(self, filter).await?;
        if !self.store().capabilities().ordered_listing {
            while !listed.pages.ended() {
                entries.extend(listed.page(self, filter).await?);
            }
            pages::sort(self, &listed.prefix, &mut entries)?;
        }
        for entry in entries {
            if filter.limit.is_some_and(|limit| listed.taken >= limit) {
                return Ok(false);
            }
            listed.taken += 1;
            manifest.push(base, &entry.key, entry.size, entry.version.as_ref());
        }
        Ok(!listed.pages.ended())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, size: u64) -> ListEntry {
        ListEntry { key: key.to_owned(), size: Some(size), version: None, modified_ms: None, storage_class: None }
    }

    #[test]
    fn a_star_stays_within_a_component_and_two_do_not() {
        let one = Filter::new(Some("*.jpg"), Vec::new(), None).unwrap();
        let any = Filter::new(Some("**/*.jpg"), Vec::new(), None).unwrap();
        assert!(one.passes("train/", &entry("train/a.jpg", 1)));
        assert!(!one.passes("train/", &entry("train/x/a.jpg", 1)));
        assert!(any.passes("train/", &entry("train/x/y/a.jpg", 1)) && any.passes("train/", &entry("train/a.jpg", 1)));
    }

    #[test]
    fn directory_markers_are_never_taken_and_empty_objects_are() {
        let all = Filter::default();
        assert!(!all.passes("", &entry("folder/", 0)));
        assert!(all.passes("", &entry("folder/", 3)) && all.passes("", &entry("empty", 0)));
    }

    #[test]
    fn any_of_the_suffixes_will_do() {
        let filter = Filter::new(None, vec![".png".into(), ".jpg".into()], None).unwrap();
        assert!(filter.passes("", &entry("a.png", 1)) && filter.passes("", &entry("a.jpg", 1)));
        assert!(!filter.passes("", &entry("a.txt", 1)));
    }

    #[test]
    fn a_broken_glob_is_a_config_error_that_names_it() {
        let error = Filter::new(Some("a[b"), Vec::new(), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("a[b"), "{error}");
    }
}
