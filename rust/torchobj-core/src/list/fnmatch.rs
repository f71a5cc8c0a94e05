//! Patterns of a shell, as `fnmatchcase` of Python matches them. `*` and `?` also match slashes, and every text is a pattern.

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
    fn many_stars_take_no_exponential_time() {
        assert!(!matches(&format!("{}b", "a*".repeat(100)), &"a".repeat(10_000)));
    }
}
