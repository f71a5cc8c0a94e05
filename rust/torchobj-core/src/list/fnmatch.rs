//! Patterns of a shell, as `fnmatchcase` of Python matches them. `*` and `?` also match slashes, and every text is a pattern.

use std::collections::BTreeSet;

/// Returns whether `pattern` matches the whole of `text`.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut next) = (0, 0);
    // After the last `*`, and the first character that it does not match yet.
    let mut star = None;
    loop {
        let end = match pattern.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, next));
                continue;
            }
            None if next == text.len() => return true,
            Some(_) => text.get(next).and_then(|found| matched(&pattern, at, *found)),
            None => None,
        };
        match (end, star) {
            (Some(end), _) => (at, next) = (end, next + 1),
            (None, Some((after, from))) if from < text.len() => {
                star = Some((after, from + 1));
                (at, next) = (after, from + 1);
            }
            (None, _) => return false,
        }
    }
}

/// Which paths below a folder a pattern matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Below {
    None,
    Some,
    All,
}

/// Returns which of the paths that begin with `folder`, which ends with a slash, `pattern` matches. `Some` if it cannot be
/// known without them.
pub(super) fn matches_below(pattern: &str, folder: &str) -> Below {
    let pattern: Vec<char> = pattern.chars().collect();
    // The positions in the pattern after the characters so far.
    let mut at = BTreeSet::from([0]);
    for found in folder.chars() {
        at = all_after_stars(&pattern, at)
            .into_iter()
            .filter_map(|position| match pattern.get(position)? {
                '*' => Some(position),
                _ => matched(&pattern, position, found),
            })
            .collect();
    }
    // A path below the folder has more characters.
    at = all_after_stars(&pattern, at).into_iter().filter(|position| *position < pattern.len()).collect();
    if at.is_empty() {
        return Below::None;
    }
    let is_rest_any = |position: &usize| pattern[*position..].iter().all(|element| *element == '*');
    if at.iter().any(is_rest_any) { Below::All } else { Below::Some }
}

/// Positions in a pattern, and those after the stars at them.
fn all_after_stars(pattern: &[char], positions: BTreeSet<usize>) -> BTreeSet<usize> {
    let after = |position: usize| position + pattern[position..].iter().take_while(|element| **element == '*').count();
    positions.into_iter().flat_map(|position| position..=after(position)).collect()
}

/// The end of the element of `pattern` at `at`, if it matches `found`.
fn matched(pattern: &[char], at: usize, found: char) -> Option<usize> {
    let matches = match pattern[at] {
        '?' => true,
        '[' => {
            if let Some(close) = close_of(pattern, at) {
                return contains(&pattern[at + 1..close], found).then_some(close + 1);
            }
            found == '['
        }
        literal => found == literal,
    };
    matches.then_some(at + 1)
}

/// The bracket that closes the one at `open`. One that comes first in the brackets is a member.
fn close_of(pattern: &[char], open: usize) -> Option<usize> {
    let first = open + 1 + usize::from(pattern.get(open + 1) == Some(&'!'));
    let start = first + usize::from(pattern.get(first) == Some(&']'));
    (start..pattern.len()).find(|index| pattern[*index] == ']')
}

/// Whether the members of brackets, characters and ranges, contain `found`; with `!` before them, whether they do not.
fn contains(members: &[char], found: char) -> bool {
    let (negated, mut rest) = match members {
        ['!', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut contained = false;
    loop {
        rest = match rest {
            [first, '-', last, rest @ ..] => {
                contained |= (*first..=*last).contains(&found);
                rest
            }
            [member, rest @ ..] => {
                contained |= *member == found;
                rest
            }
            [] => return contained != negated,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_those_of_python() {
        // The values of `fnmatch.fnmatchcase`; tests/files/test_files.py compares random patterns.
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*.txt", "a/b.txt", true),
            ("*.txt", "a.txt.gz", false),
            ("a/*", "a/b/c", true),
            ("a/*", "a", false),
            ("?", "/", true),
            ("?", "é", true),
            ("", "a", false),
            ("**b**", "abc", true),
            ("*a*b*c", "aXbXbc", true),
            ("[abc]", "b", true),
            ("[!abc]", "b", false),
            ("[!abc]", "d", true),
            ("[a-c]x", "bx", true),
            ("[c-a]", "b", false),
            ("[]]", "]", true),
            ("[!]]", "]", false),
            ("[a-]", "-", true),
            ("[^a]", "^", true),
            ("[", "[", true),
            ("a[b", "a[b", true),
            ("[!", "[!", true),
            ("{a,b}", "a", false),
            ("\\*", "\\x", true),
            ("A", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn the_paths_below_a_folder_that_match_are_all_some_or_none() {
        for (pattern, expected) in [
            ("*", Below::All),
            ("a/*", Below::All),
            ("a*", Below::All),
            ("*/**", Below::All),
            ("[ab]/b*", Below::All),
            ("*.txt", Below::Some),
            ("a/b/c", Below::Some),
            ("a/b/?", Below::Some),
            ("?????", Below::Some),
            ("a/[*", Below::None),
            ("a/b/[*", Below::Some),
            ("a/b/[*]", Below::Some),
            ("a/b", Below::None),
            ("a/b/", Below::None),
            ("a", Below::None),
            ("b/*", Below::None),
            ("a/c*", Below::None),
            ("[!a]*", Below::None),
            ("????", Below::None),
            ("", Below::None),
        ] {
            assert_eq!(matches_below(pattern, "a/b/"), expected, "{pattern:?}");
        }
    }

    #[test]
    fn many_stars_take_no_exponential_time() {
        assert_eq!(matches_below(&format!("{}b", "a*".repeat(100)), &"a".repeat(10_000)), Below::Some);
        assert!(!matches(&format!("{}b", "a*".repeat(100)), &"a".repeat(10_000)));
    }
}
