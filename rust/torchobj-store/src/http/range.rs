//! Writes `Range` headers and parses `Content-Range`. Does no I/O.

use std::ops::Range;

use torchobj_core::types::ByteRange;

/// The value of a `Range` header, in which the last byte is inclusive.
pub(crate) fn header(range: &ByteRange) -> String {
    match range {
        ByteRange::Bounded(range) => format!("bytes={}-{}", range.start, range.end.saturating_sub(1)),
        ByteRange::From(start) => format!("bytes={start}-"),
        ByteRange::Suffix(length) => format!("bytes=-{length}"),
    }
}

/// Parses a `Content-Range` header, such as `bytes 0-9/100`: the range, and the size of the whole object unless it is `*`.
pub(crate) fn parse_content_range(header: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (unit, header) = header.trim().split_once([' ', '='])?;
    let (range, size) = header.split_once('/').filter(|_| unit.eq_ignore_ascii_case("bytes"))?;
    let size = match size.trim() {
        "*" => None,
        size => Some(size.parse::<u64>().ok()?),
    };
    // An empty object has no range: MinIO sends `bytes 0--1/0`, s3rver `bytes 0-0/0`.
    if size == Some(0) {
        return Some((0..0, size));
    }
    let (first, last) = range.trim().split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let end = last.checked_add(1)?;
    (first <= end && size.is_none_or(|size| end <= size)).then_some((first..end, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_byte_of_a_range_header_is_inclusive() {
        assert_eq!(header(&ByteRange::Bounded(0..10)), "bytes=0-9");
        assert_eq!(header(&ByteRange::From(7)), "bytes=7-");
        assert_eq!(header(&ByteRange::Suffix(3)), "bytes=-3");
    }

    #[test]
    fn a_content_range_is_parsed_and_a_malformed_one_is_none() {
        for right in ["bytes 0-9/100", " Bytes 0-9/100", "bytes=0-9/100", "bytes  0-9/100"] {
            assert_eq!(parse_content_range(right), Some((0..10, Some(100))), "{right}");
        }
        assert_eq!(parse_content_range("bytes 5-9/*"), Some((5..10, None)));
        for empty in ["bytes 0--1/0", "bytes */0", "bytes 0-0/0"] {
            assert_eq!(parse_content_range(empty), Some((0..0, Some(0))), "{empty}");
        }
        // That of a range after the end, by an emulator of Google Cloud Storage.
        assert_eq!(parse_content_range("bytes 100-99/100"), Some((100..100, Some(100))));
        let past = format!("bytes 0-{}/*", u64::MAX);
        for wrong in ["", "bytes 9-0/100", "bytes 0-100/100", "items 0-9/100", "bytes */100", "bytes 0-9", &past] {
            assert_eq!(parse_content_range(wrong), None, "{wrong}");
        }
    }
}
