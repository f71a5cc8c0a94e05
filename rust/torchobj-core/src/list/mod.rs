//! Lists a prefix, and lists one into a manifest. A filter selects the objects.
//!
//! `stream` runs the requests of a listing, page after page or for several ranges of keys concurrently. `ranges` holds the
//! state of the ranges, `split` chooses where to divide them, and `pages` validates the pages of each. `heads` sends HEAD
//! requests for listed objects.

mod fnmatch;
mod heads;
mod pages;
mod ranges;
mod split;
mod stream;
#[cfg(test)]
mod stream_tests;

use std::sync::Arc;
use std::time::Duration;

use globset::{GlobBuilder, GlobMatcher};
use tokio::time::Instant;

use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::manifest::Manifest;
use crate::types::ListEntry;

pub use self::heads::{HasMetadata, Scan, head_many, try_head_many};
pub use self::pages::Pages;
pub use self::stream::{ListOptions, ListStream};

/// Interval at which the progress of a long listing is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Selects objects of a listing. Directory markers (empty objects whose keys end in `/`) are never selected.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    glob: Option<GlobMatcher>,
    suffixes: Vec<String>,
    limit: Option<usize>,
    /// Whether a relative path that matches the pattern is selected. The last one that matches counts.
    patterns: Vec<(bool, String)>,
}

impl Filter {
    /// `glob` is matched against the key without the prefix: `*` and `?` match within a component, `**` matches across
    /// components. If `suffixes` is not empty, a key must end in one of them. At most `limit` objects are selected, the first
    /// in key order.
    ///
    /// # Errors
    /// `Config` if `glob` is not a valid pattern.
    pub fn new(glob: Option<&str>, suffixes: Vec<String>, limit: Option<usize>) -> Result<Self> {
        let compile = |pattern: &str| {
            let glob = GlobBuilder::new(pattern).literal_separator(true).build().map_err(|source| {
                Error::new(ErrorKind::Config, Operation::List, format!("glob={pattern:?}"), "not a valid pattern")
                    .with_source(source)
            })?;
            Ok(glob.compile_matcher())
        };
        Ok(Self { glob: glob.map(compile).transpose()?, suffixes, limit, patterns: Vec::new() })
    }

    /// Adds patterns, in order: whether a relative path that the pattern of a shell matches is selected. `*` and `?` also match
    /// slashes. The last one that matches counts.
    #[must_use]
    pub fn with_patterns(self, patterns: Vec<(bool, String)>) -> Self {
        Self { patterns, ..self }
    }

    /// The prefix of all keys that match, given that of the listing: `glob` is literal up to its first special character.
    pub(crate) fn narrow(&self, prefix: &str) -> String {
        let pattern = self.glob.as_ref().map_or("", |glob| glob.glob().glob());
        let literal = pattern.find(['*', '?', '[', '{', '\\']).unwrap_or(pattern.len());
        format!("{prefix}{}", &pattern[..literal])
    }

    pub(crate) fn selects(&self, prefix: &str, entry: &ListEntry) -> bool {
        let marker = entry.size == Some(0) && entry.key.ends_with('/');
        let suffix = self.suffixes.is_empty() || self.suffixes.iter().any(|suffix| entry.key.ends_with(suffix));
        let relative = entry.key.strip_prefix(prefix).unwrap_or(&entry.key);
        !marker && suffix && self.selects_name(relative)
    }

    /// Whether the glob and the patterns select a relative path.
    pub(crate) fn selects_name(&self, relative: &str) -> bool {
        let last = self.patterns.iter().rev().find(|(_, pattern)| fnmatch::matches(pattern, relative));
        last.is_none_or(|(selects, _)| *selects) && self.glob.as_ref().is_none_or(|glob| glob.is_match(relative))
    }
}

/// The state of a listing into a manifest.
#[derive(Debug)]
pub struct Listed {
    stream: ListStream,
    prefix: String,
    /// Number of objects that the filter selected.
    selected: usize,
    /// Number of objects received, which may exceed the limit of the filter.
    received: usize,
    started: Instant,
    reported: Instant,
}

impl Listed {
    /// A listing of the objects of `prefix` that `filter` selects, before its first page.
    pub fn new(client: &Arc<Client>, prefix: &str, filter: &Filter) -> Self {
        let now = Instant::now();
        let options = ListOptions { filter: Some(filter.clone()), ..ListOptions::default() };
        let stream = ListStream::new(client.clone(), prefix, options);
        Self { stream, prefix: prefix.to_owned(), selected: 0, received: 0, started: now, reported: now }
    }

    /// Returns the selected entries of the next page.
    async fn page(&mut self, client: &Client) -> Result<Vec<ListEntry>> {
        let Some(page) = self.stream.next().await? else { return Ok(Vec::new()) };
        self.received += page.entries.len();
        if self.reported.elapsed() >= REPORT_INTERVAL {
            self.reported = Instant::now();
            let seconds = self.started.elapsed().as_secs_f64();
            log::info!("listing {}: {} objects after {seconds:.1} s", client.store().url(&self.prefix), self.received);
        }
        Ok(page.entries)
    }
}

impl Client {
    /// Lists the objects under `prefix` that `filter` selects, in key order. `base` is the URL of this bucket in the
    /// manifest.
    ///
    /// # Errors
    /// Those of [`Pages::next`].
    pub async fn list_into(
        self: &Arc<Self>,
        manifest: &mut Manifest,
        base: &str,
        prefix: &str,
        filter: &Filter,
    ) -> Result<()> {
        let mut listed = Listed::new(self, prefix, filter);
        while self.list_page_into(manifest, base, filter, &mut listed).await? {}
        manifest.shrink();
        Ok(())
    }

    /// Adds the next page of a listing. Returns whether there are more. The listing of a store without ordered listings is
    /// added at once, sorted by key, so that its order is the same on every rank and in every epoch.
    ///
    /// # Errors
    /// Those of [`Pages::next`].
    pub async fn list_page_into(
        &self,
        manifest: &mut Manifest,
        base: &str,
        filter: &Filter,
        listed: &mut Listed,
    ) -> Result<bool> {
        let mut entries = listed.page(self).await?;
        if !self.store().capabilities().ordered_listing {
            while !listed.stream.ended() {
                entries.extend(listed.page(self).await?);
            }
            pages::sort(self, &listed.prefix, &mut entries)?;
        }
        for entry in entries {
            if filter.limit.is_some_and(|limit| listed.selected >= limit) {
                return Ok(false);
            }
            listed.selected += 1;
            manifest.push(base, &entry.key, entry.size, entry.version.as_ref());
        }
        Ok(!listed.stream.ended())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, size: u64) -> ListEntry {
        ListEntry { key: key.to_owned(), size: Some(size), version: None, modified_ms: None, storage_class: None }
    }

    #[test]
    fn a_star_matches_within_a_component_and_two_stars_match_across() {
        let one = Filter::new(Some("*.jpg"), Vec::new(), None).unwrap();
        let any = Filter::new(Some("**/*.jpg"), Vec::new(), None).unwrap();
        assert!(one.selects("train/", &entry("train/a.jpg", 1)));
        assert!(!one.selects("train/", &entry("train/x/a.jpg", 1)));
        assert!(any.selects("train/", &entry("train/x/y/a.jpg", 1)) && any.selects("train/", &entry("train/a.jpg", 1)));
    }

    #[test]
    fn a_glob_narrows_the_prefix_up_to_its_first_special_character() {
        for (glob, prefix) in [("2024/*.jpg", "p/2024/"), ("a{b,c}", "p/a"), ("*.jpg", "p/"), ("key", "p/key")] {
            assert_eq!(Filter::new(Some(glob), Vec::new(), None).unwrap().narrow("p/"), prefix);
        }
        assert_eq!(Filter::new(Some(r"a\*b"), Vec::new(), None).unwrap().narrow("p/"), "p/a");
        assert_eq!(Filter::default().narrow("p/"), "p/");
    }

    #[test]
    fn directory_markers_are_never_selected_and_empty_objects_are() {
        let all = Filter::default();
        assert!(!all.selects("", &entry("folder/", 0)));
        assert!(all.selects("", &entry("folder/", 3)) && all.selects("", &entry("empty", 0)));
    }

    #[test]
    fn a_key_with_any_of_the_suffixes_is_selected() {
        let filter = Filter::new(None, vec![".png".into(), ".jpg".into()], None).unwrap();
        assert!(filter.selects("", &entry("a.png", 1)) && filter.selects("", &entry("a.jpg", 1)));
        assert!(!filter.selects("", &entry("a.txt", 1)));
    }

    #[test]
    fn an_invalid_glob_is_a_config_error_that_names_it() {
        let error = Filter::new(Some("a[b"), Vec::new(), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("a[b"), "{error}");
    }
}
