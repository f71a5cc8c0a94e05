//! The state of a parallel listing: ranges of keys that are listed independently, and the pages that wait for their turn. Does
//! no I/O.
//!
//! A range is `(lower, end]`: its listing starts after `lower`, and keys after `end` belong to the following ranges. The ranges
//! are disjoint and cover all keys of the prefix, so that each key is listed once, whatever is written meanwhile.
//!
//! In an ordered listing, requests are for the first ranges, and pages wait until those before them were returned. If the
//! memory for waiting pages is used up by later ranges, the last of them are discarded and listed again.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use super::pages::Pages;
use super::split::{Alphabets, Listed, Split};
use crate::types::ListPage;

/// Maximum number of pages that are requested or wait for their turn: about 250 KB each.
const MAX_PAGES: usize = 96;

/// Requests that found no key and are tolerated before each page of keys allows one more.
const MAX_EMPTY: usize = 4;

/// Maximum number of directories that begin ranges: they may be small.
const MAX_DIRECTORIES: usize = 64;

/// Minimum number of parts into which a range is divided.
const MIN_PARTS: usize = 4;

/// A request of a parallel listing.
#[derive(Debug)]
pub(super) enum NextRequest {
    /// For the next page of the range `lower`.
    Page { lower: String, pages: Box<Pages>, end: Option<String> },
    /// For the directories of `parent` after `start_after`.
    Directories { parent: String, start_after: String },
}

#[derive(Debug, PartialEq)]
enum RangeState {
    Waiting,
    Running,
    Done,
}

#[derive(Debug)]
struct Range {
    end: Option<String>,
    state: RangeState,
    /// `None` while a page is requested.
    pages: Option<Box<Pages>>,
    /// The first and the last key of the last page.
    listed: Option<(String, String)>,
    /// Whether it was divided, or need not be, since the last page.
    divided: bool,
    /// Number of requests for its directories.
    asked: usize,
    ready: VecDeque<ListPage>,
}

impl Range {
    fn new(pages: Pages, end: Option<String>) -> Self {
        let ready = VecDeque::new();
        Self {
            end,
            state: RangeState::Waiting,
            pages: Some(Box::new(pages)),
            listed: None,
            divided: false,
            asked: 0,
            ready,
        }
    }

    fn is_divisible(&self) -> bool {
        self.state != RangeState::Done && !self.divided && self.listed.is_some()
    }
}

/// The ranges of a parallel listing.
#[derive(Debug)]
pub(super) struct Ranges {
    pub(super) prefix: String,
    ordered: bool,
    /// By the key after which they start.
    ranges: BTreeMap<String, Range>,
    alphabets: Alphabets,
    /// Pages of an unordered listing.
    ready: VecDeque<ListPage>,
    /// Number of requested pages, and of pages that were not returned.
    requested: usize,
    waiting: usize,
    /// Number of pages with and without keys of their range.
    full: usize,
    empty: usize,
}

impl Ranges {
    /// One range: the keys that begin with `prefix` and sort after `start_after`.
    pub(super) fn new(prefix: &str, start_after: Option<&str>, ordered: bool) -> Self {
        let range = Range::new(Pages::new(prefix, None, start_after), None);
        Self {
            prefix: prefix.to_owned(),
            ordered,
            ranges: BTreeMap::from([(start_after.unwrap_or_default().to_owned(), range)]),
            alphabets: Alphabets::default(),
            ready: VecDeque::new(),
            requested: 0,
            waiting: 0,
            full: 0,
            empty: 0,
        }
    }

    /// Returns whether all pages were returned.
    pub(super) fn ended(&self) -> bool {
        self.ranges.is_empty() && self.ready.is_empty()
    }

    /// The next page to return, if it was received.
    pub(super) fn pop(&mut self) -> Option<ListPage> {
        let page = if self.ordered { self.pop_first() } else { self.ready.pop_front() }?;
        self.waiting -= 1;
        Some(page)
    }

    fn pop_first(&mut self) -> Option<ListPage> {
        loop {
            let mut first = self.ranges.first_entry()?;
            match first.get_mut().ready.pop_front() {
                Some(page) => {
                    if first.get().ready.is_empty() && first.get().state == RangeState::Done {
                        first.remove();
                    }
                    return Some(page);
                }
                None if first.get().state == RangeState::Done => drop(first.remove()),
                None => return None,
            }
        }
    }

    /// The next request, if `running` requests are in flight and at most `limit` may be.
    pub(super) fn next_request(&mut self, running: usize, limit: usize) -> Option<NextRequest> {
        if running >= limit {
            return None;
        }
        loop {
            if !self.divides_first() {
                if let Some(lower) = self.next_waiting() {
                    return Some(self.request(lower));
                }
                if !self.may_divide() {
                    return None;
                }
            }
            // The first parts of an ordered listing are returned first. A listing of few pages sends few requests more.
            let parts = (limit - running) / if self.ordered { 2 } else { 1 };
            let (lower, split) = self.next_split(parts.min(MIN_PARTS * self.full).max(MIN_PARTS))?;
            let range = self.ranges.get_mut(&lower).expect("next_split returns an existing range");
            let start_after = range.listed.as_ref().map(|(_, last)| last.clone()).unwrap_or_default();
            range.asked += usize::from(split.parent.is_some());
            self.divide(lower, split.keys);
            if let Some(parent) = split.parent {
                return Some(NextRequest::Directories { parent, start_after });
            }
        }
    }

    fn may_divide(&self) -> bool {
        self.empty <= MAX_EMPTY + self.full && (!self.memory_is_full() || self.first_is_awaited())
    }

    /// Whether a range of an ordered listing is divided before a later one is requested, whose pages would wait.
    fn divides_first(&self) -> bool {
        let first = self.ranges.values().find(|range| range.state == RangeState::Waiting || range.is_divisible());
        self.ordered && self.may_divide() && first.is_some_and(|range| range.state != RangeState::Waiting)
    }

    fn memory_is_full(&self) -> bool {
        self.requested + self.waiting >= MAX_PAGES
    }

    /// Whether the caller waits for the first range.
    fn first_is_awaited(&self) -> bool {
        self.ordered && self.ranges.values().next().is_some_and(|range| range.ready.is_empty())
    }

    /// The first range whose next page may be requested. Discards pages of later ranges to make memory for it.
    fn next_waiting(&mut self) -> Option<String> {
        let lower = self.ranges.iter().find(|(_, range)| range.state == RangeState::Waiting)?.0.clone();
        let is_first = self.ranges.keys().next() == Some(&lower);
        if !self.memory_is_full() || (is_first && self.first_is_awaited()) {
            return Some(lower);
        }
        if !self.ordered {
            return None;
        }
        let (last, range) = self.ranges.iter_mut().rev().find(|(_, range)| !range.ready.is_empty())?;
        if *last <= lower || range.state == RangeState::Running {
            return None;
        }
        self.waiting -= range.ready.len();
        *range = Range::new(Pages::new(&self.prefix, None, Some(last)), range.end.take());
        Some(lower)
    }

    fn request(&mut self, lower: String) -> NextRequest {
        let range = self.ranges.get_mut(&lower).expect("next_waiting returns an existing range");
        range.state = RangeState::Running;
        self.requested += 1;
        let pages = range.pages.take().expect("a waiting range has its pages");
        NextRequest::Page { lower, pages, end: range.end.clone() }
    }

    /// The first range that can be divided.
    fn next_split(&mut self, parts: usize) -> Option<(String, Split)> {
        let (lower, range) = self.ranges.iter_mut().find(|(_, range)| range.is_divisible())?;
        range.divided = true;
        let (first, last) = range.listed.as_ref().expect("it was checked");
        let listed = Listed { prefix: &self.prefix, first, last, end: range.end.as_deref() };
        Some((lower.clone(), self.alphabets.split(&listed, parts, range.asked)))
    }

    fn divide(&mut self, lower: String, keys: Vec<String>) {
        let Some(first) = keys.first() else { return };
        let range = self.ranges.get_mut(&lower).expect("the range exists until it is done");
        let mut end = range.end.replace(first.clone());
        for key in keys.into_iter().rev() {
            let pages = Pages::new(&self.prefix, None, Some(&key));
            let part = Range::new(pages, end.replace(key.clone()));
            self.ranges.insert(key, part);
        }
    }

    /// Divides ranges at the common prefixes of a [`NextRequest::Directories`]. They may have been listed and divided meanwhile.
    pub(super) fn directories(&mut self, page: &ListPage) {
        let step = page.prefixes.len().div_ceil(MAX_DIRECTORIES).max(1);
        for directory in page.prefixes.iter().step_by(step) {
            let before = (Bound::Unbounded, Bound::Excluded(directory.as_str()));
            let Some((lower, range)) = self.ranges.range::<str, _>(before).next_back() else { continue };
            let is_listed = range.listed.as_ref().is_some_and(|(_, last)| last >= directory);
            let is_beyond = range.end.as_ref().is_some_and(|end| end <= directory);
            if range.state != RangeState::Done && !is_listed && !is_beyond {
                self.divide(lower.clone(), vec![directory.clone()]);
            }
        }
    }

    /// Adds a page of the range `lower`, or its end.
    pub(super) fn received(&mut self, lower: &str, pages: Box<Pages>, page: Option<ListPage>) {
        self.requested -= 1;
        let range = self.ranges.get_mut(lower).expect("a running range is kept");
        let mut page = page.unwrap_or_default();
        let mut done = pages.ended();
        if let Some(end) = &range.end {
            done |= page.entries.last().is_some_and(|entry| entry.key >= *end);
            page.entries.truncate(page.entries.partition_point(|entry| entry.key <= *end));
        }
        range.state = if done { RangeState::Done } else { RangeState::Waiting };
        range.pages = Some(pages);
        if let (Some(first), Some(last)) = (page.entries.first(), page.entries.last()) {
            self.alphabets.record(&self.prefix, page.entries.iter().map(|entry| entry.key.as_str()));
            range.listed = Some((first.key.clone(), last.key.clone()));
            range.divided = false;
            self.full += 1;
            self.waiting += 1;
            if self.ordered { range.ready.push_back(page) } else { self.ready.push_back(page) }
        } else {
            self.empty += 1;
        }
        if !self.ordered && range.state == RangeState::Done {
            self.ranges.remove(lower);
        }
    }
}
