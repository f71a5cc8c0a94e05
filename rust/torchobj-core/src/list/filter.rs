//! Selects objects of a listing by their keys.

use globset::{GlobBuilder, GlobMatcher};

use super::fnmatch::{self, Below};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::ListEntry;

/// Selects objects of a listing. Directory markers (empty objects whose keys end in `/`) are never selected.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    glob: Option<GlobMatcher>,
    /// Matches the folders above the files that the glob matches, by their depth.
    folders: Vec<GlobMatcher>,
    /// Whether the glob also matches files at other depths than directly below the last of `folders`.
    is_deep: bool,
    suffixes: Vec<String>,
    pub(super) limit: Option<usize>,
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
                    .with_hint("[*], [?], [[] and [{] stand for the characters")
            })?;
            Ok(glob.compile_matcher())
        };
        let components: Vec<&str> = glob.unwrap_or("**").split('/').collect();
        let above = &components[..components.len() - 1];
        // Elements that match across components end the folders whose depth is known.
        let is_deep = |component: &&str| *component == "**" || component.contains(['{', '[', '\\']);
        let known = above.iter().position(is_deep).unwrap_or(above.len());
        let folders = (1..=known).map(|depth| compile(&above[..depth].join("/")));
        Ok(Self {
            glob: glob.map(compile).transpose()?,
            folders: folders.collect::<Result<_>>()?,
            // A class matches a slash, too.
            is_deep: known < above.len() || components.last().is_some_and(|last| *last == "**" || last.contains('[')),
            suffixes,
            limit,
            patterns: Vec::new(),
        })
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

    /// Whether the glob and the patterns may select a file below a folder, given its relative path with a slash at the end.
    pub(crate) fn selects_below(&self, folder: &str) -> bool {
        for (selects, pattern) in self.patterns.iter().rev() {
            match (selects, fnmatch::matches_below(pattern, folder)) {
                (false, Below::All) => return false,
                (true, Below::Some | Below::All) => break,
                _ => {}
            }
        }
        if self.glob.is_none() {
            return true;
        }
        let components: Vec<&str> = folder.trim_end_matches('/').split('/').collect();
        let known = components.len().min(self.folders.len());
        let is_above = known == 0 || self.folders[known - 1].is_match(components[..known].join("/"));
        is_above && (self.is_deep || components.len() == known)
    }

    /// Whether the glob and the patterns select a relative path.
    pub(crate) fn selects_name(&self, relative: &str) -> bool {
        let last = self.patterns.iter().rev().find(|(_, pattern)| fnmatch::matches(pattern, relative));
        last.is_none_or(|(selects, _)| *selects) && self.glob.as_ref().is_none_or(|glob| glob.is_match(relative))
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
    fn a_folder_is_searched_if_a_file_below_it_may_be_selected() {
        let of_glob = |glob: &str| Filter::new(Some(glob), Vec::new(), None).unwrap();
        for (glob, folders, others) in [
            ("*.txt", &[][..], &["a/", "a/b/"][..]),
            ("*/*.txt", &["a/"], &["a/b/"]),
            ("a*/b/*", &["a/", "ax/", "a/b/"], &["b/", "a/c/", "a/b/c/"]),
            ("a/**", &["a/", "a/b/"], &["b/"]),
            ("a/**/*.txt", &["a/", "a/b/", "a/b/c/"], &["b/", "b/a/"]),
            ("a/{b,c/d}/*.txt", &["a/", "a/b/", "a/c/d/"], &["b/"]),
            ("a?[!b]c", &["ab/", "a/"], &[]),
            ("**", &["a/", "a/b/"], &[]),
        ] {
            assert!(folders.iter().all(|folder| of_glob(glob).selects_below(folder)), "{glob}");
            assert!(!others.iter().any(|folder| of_glob(glob).selects_below(folder)), "{glob}");
        }
        let of_patterns = |patterns: &[(bool, &str)]| {
            let patterns = patterns.iter().map(|(selects, pattern)| (*selects, (*pattern).to_owned()));
            Filter::default().with_patterns(patterns.collect())
        };
        for (patterns, expected) in [
            (&[][..], true),
            (&[(false, "a/*")], false),
            (&[(false, "*.txt")], true),
            (&[(false, "*"), (true, "*.txt")], true),
            (&[(false, "*"), (true, "b/*")], false),
            (&[(true, "*.txt"), (false, "a*")], false),
        ] {
            assert_eq!(of_patterns(patterns).selects_below("a/"), expected, "{patterns:?}");
        }
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
