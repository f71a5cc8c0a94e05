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

/// Parses a `Content-Range` header, such as `bytes 0-9/100`: the range and the size of the whole object.
pub(crate) fn parse_content_range(header: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = header.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, size): (u64, u64, u64) = (first.parse().ok()?, last.parse().ok()?, size.parse().ok()?);
    (first <= last && last < size).then_some((first..last + 1, size))
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
        assert_eq!(parse_content_range("bytes 0-9/100"), Some((0..10, 100)));
        for wrong in ["", "bytes 0-9/*", "bytes 9-0/100", "bytes 0-100/100", "items 0-9/100", "bytes */100"] {
            assert_eq!(parse_content_range(wrong), None, "{wrong}");
        }
    }
}
