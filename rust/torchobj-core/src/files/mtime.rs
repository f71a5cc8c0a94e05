//! The time of the last modification of a file, as text in metadata: decimal seconds since 1970, as rclone writes it.

use std::fmt::Write;

/// Name of the metadata entry.
pub(super) const NAME: &str = "mtime";

const NANOS: i128 = 1_000_000_000;

/// A time of modification in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mtime(i128);

impl Mtime {
    pub(super) fn new(seconds: i64, nanos: i64) -> Self {
        Self(i128::from(seconds) * NANOS + i128::from(nanos))
    }

    pub(super) fn of_ms(ms: i64) -> Self {
        Self(i128::from(ms) * 1_000_000)
    }

    /// Whole seconds, and nanoseconds from 0 to 999 999 999.
    pub(super) fn parts(self) -> Option<(i64, u32)> {
        Some((i64::try_from(self.0.div_euclid(NANOS)).ok()?, u32::try_from(self.0.rem_euclid(NANOS)).ok()?))
    }

    /// Parses the text of metadata; `None` if it is not a number of seconds. Digits after the ninth decimal are ignored.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, text),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let is_number = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
        if whole.is_empty() || whole.len() > 18 || !is_number(whole) || !is_number(fraction) {
            return None;
        }
        let nanos: String = fraction.chars().chain("000000000".chars()).take(9).collect();
        let total = whole.parse::<i128>().ok()? * NANOS + nanos.parse::<i128>().ok()?;
        Some(Self(if negative { -total } else { total }))
    }

    /// The text for metadata.
    pub(super) fn text(self) -> String {
        let (sign, total) = if self.0 < 0 { ("-", -self.0) } else { ("", self.0) };
        let mut text = format!("{sign}{}", total / NANOS);
        if total % NANOS != 0 {
            write!(text, ".{:09}", total % NANOS).expect("writing to a string does not fail");
            text.truncate(text.trim_end_matches('0').len());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_decimal_seconds_and_parsed_back() {
        for (seconds, nanos, text) in [
            (1_700_000_000, 0, "1700000000"),
            (1_700_000_000, 123_456_789, "1700000000.123456789"),
            (1_700_000_000, 500_000_000, "1700000000.5"),
            (-2, 500_000_000, "-1.5"),
        ] {
            let time = Mtime::new(seconds, nanos);
            assert_eq!(time.text(), text);
            assert_eq!(Mtime::parse(text), Some(time));
            assert_eq!(time.parts(), Some((seconds, u32::try_from(nanos).unwrap())));
        }
        assert_eq!(Mtime::parse("1.0000000019"), Some(Mtime::new(1, 1)));
    }

    #[test]
    fn text_that_is_no_number_of_seconds_is_not_a_time() {
        for text in ["", "-", ".", ".5", "1e9", "+1", "1.x", "2026-01-01T00:00:00Z", "9999999999999999999"] {
            assert_eq!(Mtime::parse(text), None, "{text}");
        }
    }
}
