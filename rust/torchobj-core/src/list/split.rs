//! Chooses keys that divide the rest of a listing into parts of about one page, from the keys that were listed. Does no I/O.
//!
//! Keys are treated as numbers: the character at each position after the prefix is a digit, whose base is the number of
//! characters seen at this position. The last page covers an interval of these numbers; the rest of the range, measured in
//! such intervals, is an estimate of the remaining pages. If keys are spread evenly, as hashes and UUIDs are, it is exact.
//! If they are not, as with zero-padded numbers that use a small part of their digits, it is far too large: the parts
//! therefore grow with their distance from the last key, so that a few of them reach the end of any range.

use std::cmp::Ordering;

/// Number of positions whose characters are recorded.
const MAX_POSITIONS: usize = 256;

/// Maximum number of characters that are recorded for a position.
const MAX_CHARACTERS: usize = 256;

/// The first, the last and every 16th key of a page are recorded.
const SAMPLE_EVERY: usize = 16;

/// Size of a part in pages. A part slightly smaller than a page is listed by one request.
const PART_PAGES: f64 = 0.9;

/// Maximum number of values of the positions at which the keys of a page differ. Beyond it, f64 has too few digits for the
/// difference of two keys.
const MAX_VALUES: f64 = (1_u64 << 40) as f64;

/// How the rest of a range is divided. Neither keys nor a directory: it has about one page.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Split {
    /// Keys within the range after which parts begin, in ascending order.
    pub(super) keys: Vec<String>,
    /// The keys of the page are within a directory. A listing of this prefix with delimiter `/` returns it and those that
    /// follow.
    pub(super) parent: Option<String>,
}

/// The last page of a range, and the end of the range.
pub(super) struct Listed<'a> {
    pub(super) prefix: &'a str,
    pub(super) first: &'a str,
    pub(super) last: &'a str,
    pub(super) end: Option<&'a str>,
}

/// The characters that are expected at each position after the prefix, sorted.
#[derive(Debug, Default)]
pub(super) struct Alphabets {
    /// The characters that were seen.
    seen: Vec<Vec<char>>,
    /// Those and others of their classes.
    positions: Vec<Vec<char>>,
    /// Whether a key ended before the position.
    ends: Vec<bool>,
    all: Vec<char>,
}

/// First letter, last letter of hexadecimal numbers, last letter.
const LETTERS: [(char, char, char); 2] = [('a', 'f', 'z'), ('A', 'F', 'Z')];

/// Number of letters at a position with digits from which others are expected. A file extension after numbers of different
/// lengths has fewer.
const MIN_LETTERS: usize = 4;

impl Alphabets {
    /// Records the characters of the keys of a page, without its prefix.
    pub(super) fn record<'a>(&mut self, prefix: &str, keys: impl ExactSizeIterator<Item = &'a str>) {
        let last = keys.len().saturating_sub(1);
        for (index, key) in keys.enumerate() {
            if index % SAMPLE_EVERY == 0 || index == last {
                self.record_key(without(prefix, key));
            }
        }
        // Keys are sorted: letters may follow where only digits were seen, if other positions have both.
        let with_digits = self.seen.iter().filter(|seen| has_digit(seen));
        let mixed: Vec<(char, char)> = with_digits.flat_map(|seen| letters(seen)).collect();
        self.positions.resize_with(self.seen.len(), Vec::new);
        for (seen, expected) in self.seen.iter().zip(&mut self.positions) {
            expected.clone_from(seen);
            let classes = letters(seen).collect::<Vec<_>>();
            let digits = has_digit(seen).then_some(('0', '9'));
            let others = if digits.is_some() && classes.is_empty() { &mixed[..] } else { &classes };
            for (first, last) in others.iter().copied().chain(digits) {
                (first..=last).for_each(|character| insert(expected, character));
            }
        }
    }

    fn record_key(&mut self, key: &str) {
        let length = key.chars().count().min(MAX_POSITIONS);
        if self.ends.len() <= length {
            self.ends.resize(length + 1, false);
        }
        self.ends[length] = true;
        for (position, character) in key.chars().take(MAX_POSITIONS).enumerate() {
            // A server may refuse control characters in a query.
            if character.is_control() {
                continue;
            }
            insert(&mut self.all, character);
            if position >= self.seen.len() {
                self.seen.resize_with(position + 1, Vec::new);
            }
            insert(&mut self.seen[position], character);
        }
    }

    /// The characters of a position.
    fn at(&self, position: usize) -> &[char] {
        self.positions.get(position).map_or(&self.all, Vec::as_slice)
    }

    /// The digit that stands for the end of a key, and the number of digits of a position.
    fn base(&self, position: usize) -> (usize, f64) {
        let end = usize::from(self.ends.get(position).copied().unwrap_or(true));
        (end, (self.at(position).len() + end).max(1) as f64)
    }

    /// Number of values of the positions `from..=to`.
    fn values(&self, from: usize, to: usize) -> f64 {
        (from..=to).map(|position| self.base(position).1).product()
    }

    /// The value of a key as a fraction of 1, from position `from`.
    fn value(&self, key: &[char], from: usize) -> f64 {
        let (mut value, mut unit) = (0.0, 1.0);
        for (position, character) in key.iter().enumerate().skip(from) {
            let (end, base) = self.base(position);
            unit /= base;
            if unit < f64::EPSILON {
                break;
            }
            let digit = match self.at(position).binary_search(character) {
                Ok(index) => (index + end) as f64,
                // Between two recorded characters.
                Err(index) => (index + end) as f64 - 0.5,
            };
            value += unit * digit;
        }
        value
    }

    /// The key of a value, to position `to`.
    fn key(&self, mut value: f64, start: &[char], to: usize) -> String {
        let mut key: String = start.iter().collect();
        for position in start.len()..=to {
            let (end, base) = self.base(position);
            value *= base;
            let digit = value.floor().clamp(0.0, base - 1.0);
            value -= digit;
            match (digit as usize).checked_sub(end).and_then(|index| self.at(position).get(index)) {
                Some(character) => key.push(*character),
                None => break,
            }
        }
        key
    }

    /// Divides the rest of a range into at most `parts` parts after its next page. `asked` is the number of directories that
    /// were returned for this range.
    pub(super) fn split(&self, listed: &Listed<'_>, parts: usize, asked: usize) -> Split {
        let characters = |key| without(listed.prefix, key).chars().collect::<Vec<_>>();
        let (first, last) = (characters(listed.first), characters(listed.last));
        let end = listed.end.map(characters);
        // The first positions at which the keys of the page differ, and at which the range does.
        let differ = common(&first, &last);
        let from = end.as_ref().map_or(0, |end| common(&last, end)).min(differ);
        if self.values(from, differ) <= MAX_VALUES {
            let end = end.as_deref().map_or(1.0, |end| self.value(end, from));
            return Split { keys: self.divide(listed, &first, &last, from, end, parts), parent: None };
        }
        // The keys of the page have a much longer common prefix than the range: divide their directory.
        let is_slash = |character: &char| *character == '/';
        let within = last[..differ].iter().rposition(is_slash).map_or(0, |slash| slash + 1);
        let slashes = (from..differ).filter(|position| is_slash(&last[*position]));
        let parent = slashes.clone().nth(asked).map(|slash| {
            let length = last[..slash].iter().rposition(is_slash).map_or(0, |slash| slash + 1);
            format!("{}{}", listed.prefix, last[..length].iter().collect::<String>())
        });
        let within = within.max(from);
        let keys = if self.values(within, differ) <= MAX_VALUES {
            self.divide(listed, &first, &last, within, 1.0, parts)
        } else {
            ascending(listed, (within..differ).rev().filter_map(|position| self.next(&last, position)))
        };
        Split { keys, parent }
    }

    /// Divides the values from the last key to `end`.
    fn divide(
        &self,
        listed: &Listed<'_>,
        first: &[char],
        last: &[char],
        from: usize,
        end: f64,
        parts: usize,
    ) -> Vec<String> {
        let at = self.value(last, from);
        let page = at - self.value(first, from);
        let pages = (end - at) / page;
        if !pages.is_finite() || pages < 2.0 * PART_PAGES {
            return Vec::new();
        }
        // Two more positions than the keys of the page need: 1 % of it, if a position has 10 characters.
        let to = common(first, last) + 2;
        let keys = offsets(pages, parts).map(|offset| self.key(at + offset * page, &last[..from], to));
        ascending(listed, keys)
    }

    /// The key with the next character at a position.
    fn next(&self, last: &[char], position: usize) -> Option<String> {
        let larger = |set: &[char]| set.iter().find(|character| **character > last[position]).copied();
        let character = larger(self.at(position)).or_else(|| larger(&self.all))?;
        Some(last[..position].iter().chain([&character]).collect())
    }
}

/// Adds the prefix to the keys. Keeps those within the range that ascend.
fn ascending(listed: &Listed<'_>, keys: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for key in keys {
        let key = format!("{}{key}", listed.prefix);
        let before = kept.last().map_or(listed.last, String::as_str);
        if key.as_str() > before && listed.end.is_none_or(|end| key.as_str() < end) {
            kept.push(key);
        }
    }
    kept
}

/// Distances of the divisions of `pages` pages, in pages. Each part is larger than the one before by a factor.
fn offsets(pages: f64, parts: usize) -> impl Iterator<Item = f64> {
    let total = |factor: f64| (0..parts).fold(0.0, |sum, _| sum * factor + PART_PAGES);
    let (mut low, mut high) = (1.0, 2.0);
    while total(high) < pages {
        high *= 2.0;
    }
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        match total(middle).total_cmp(&pages) {
            Ordering::Less => low = middle,
            _ => high = middle,
        }
    }
    let (mut offset, mut part) = (0.0, PART_PAGES);
    std::iter::from_fn(move || {
        offset += part;
        part *= low;
        (pages - offset > PART_PAGES / 2.0).then_some(offset)
    })
    .take(parts)
}

fn has_digit(characters: &[char]) -> bool {
    characters.iter().any(char::is_ascii_digit)
}

/// The ranges of letters that are expected where `characters` were seen.
fn letters(characters: &[char]) -> impl Iterator<Item = (char, char)> {
    LETTERS.into_iter().filter_map(move |(first, hexadecimal, last)| {
        let mut seen = characters.iter().filter(|character| (first..=last).contains(character));
        let (count, largest) = (seen.clone().count(), seen.next_back()?);
        match has_digit(characters) {
            true if count < MIN_LETTERS => None,
            true if *largest <= hexadecimal => Some((first, hexadecimal)),
            _ => Some((first, last)),
        }
    })
}

fn without<'a>(prefix: &str, key: &'a str) -> &'a str {
    key.strip_prefix(prefix).unwrap_or(key)
}

fn common(one: &[char], other: &[char]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

fn insert(set: &mut Vec<char>, character: char) {
    if let Err(index) = set.binary_search(&character)
        && set.len() < MAX_CHARACTERS
    {
        set.insert(index, character);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(keys: &[&str], end: Option<&str>, parts: usize, asked: usize) -> Split {
        let mut alphabets = Alphabets::default();
        keys.iter().for_each(|key| alphabets.record("p/", [*key].into_iter()));
        let listed = Listed { prefix: "p/", first: keys[0], last: keys[keys.len() - 1], end };
        alphabets.split(&listed, parts, asked)
    }

    fn keys(keys: &[&str], end: Option<&str>, parts: usize) -> Vec<String> {
        split(keys, end, parts, 0).keys
    }

    #[test]
    fn hashes_are_divided_over_all_their_characters() {
        let page: Vec<String> = (0..64).map(|index| format!("p/0{:03x}", index * 64 + index * 37 % 64)).collect();
        let points = keys(&page.iter().map(String::as_str).collect::<Vec<_>>(), None, 32);
        for digit in "123456789abcdef".chars() {
            assert!(points.iter().any(|point| point[2..].starts_with(digit)), "{digit} {points:?}");
        }
    }

    #[test]
    fn the_first_keys_after_zero_padded_numbers_are_close_and_the_last_ones_far() {
        let points = keys(&["p/000000000.jpg", "p/000000999.jpg"], None, 32);
        assert!(points[0].as_str() < "p/000002", "{points:?}");
        assert!(points.last().unwrap().as_str() > "p/1", "{points:?}");
        assert!(points.is_sorted());
    }

    #[test]
    fn a_rest_of_one_page_is_not_divided() {
        assert_eq!(keys(&["p/100", "p/500"], Some("p/8"), 8), [""; 0]);
    }

    #[test]
    fn divisions_are_after_the_last_key_and_before_the_end() {
        assert_eq!(keys(&["p/20", "p/21"], Some("p/2100001"), 8), [""; 0]);
        for end in ["p/27", "p/3", "p/27ä"] {
            for point in keys(&["p/20", "p/21"], Some(end), 8) {
                assert!("p/21" < point.as_str() && point.as_str() < end, "{point} {end}");
            }
        }
    }

    #[test]
    fn the_directory_of_a_page_is_divided_and_its_parents_are_returned_one_after_the_other() {
        let page =
            ["p/one-experiment-with-a-long-name/run-17/000000", "p/one-experiment-with-a-long-name/run-17/000999"];
        let parents: Vec<_> = (0..3).map(|asked| split(&page, None, 8, asked).parent).collect();
        let expected = [Some("p/"), Some("p/one-experiment-with-a-long-name/"), None];
        assert_eq!(parents, expected.map(|parent| parent.map(str::to_owned)));
        let keys = keys(&page, Some("p/one-experiment-with-a-long-name/run-18/"), 8);
        assert!(!keys.is_empty() && keys.iter().all(|key| key.starts_with(&page[0][..38])), "{keys:?}");
    }

    #[test]
    fn a_long_common_prefix_without_directories_is_divided_after_each_position() {
        let name = "x".repeat(40);
        let (first, last) = (format!("p/a{name}000"), format!("p/a{name}999"));
        let points = keys(&[&first, &last], None, 8);
        assert!(points.iter().any(|point| point == "p/b"), "{points:?}");
    }

    #[test]
    fn parts_grow_until_they_reach_the_end() {
        for pages in [2.0, 10.0, 400.0, 1e9, 1e30] {
            let offsets: Vec<f64> = offsets(pages, 16).collect();
            assert!(!offsets.is_empty() && offsets.len() <= 16, "{pages} {offsets:?}");
            assert!(offsets.is_sorted() && *offsets.last().unwrap() < pages);
            assert!(pages - offsets.last().unwrap() <= 0.9 * pages, "{pages} {offsets:?}");
        }
    }
}
