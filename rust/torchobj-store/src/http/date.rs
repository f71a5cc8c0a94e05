//! Parses dates in headers and documents to milliseconds since 1970. Only `skew_s` reads the clock.

use std::time::SystemTime;

use aws_smithy_types::date_time::{DateTime, Format};

/// Parses a date in a header, such as `Sun, 06 Nov 1994 08:49:37 GMT`, to milliseconds since 1970.
pub(crate) fn http_ms(text: &str) -> Option<i64> {
    DateTime::from_str(text, Format::HttpDate).ok()?.to_millis().ok()
}

/// Parses a time in XML or JSON, such as `1994-11-06T08:49:37.000Z` or with an offset, to milliseconds since 1970.
pub(crate) fn rfc3339_ms(text: &str) -> Option<i64> {
    DateTime::from_str(text, Format::DateTimeWithOffset).ok()?.to_millis().ok()
}

/// Seconds by which the `Date` header of a response is ahead of the clock of this machine.
pub(crate) fn skew_s(date: &str) -> Option<i64> {
    let date = DateTime::from_str(date, Format::HttpDate).ok()?;
    Some(date.secs() - DateTime::from(SystemTime::now()).secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_parsed_and_malformed_ones_are_none() {
        assert_eq!(http_ms("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777_000));
        assert_eq!(rfc3339_ms("1994-11-06T08:49:37.250Z"), Some(784_111_777_250));
        assert_eq!(rfc3339_ms("1994-11-06T10:49:37+02:00"), Some(784_111_777_000));
        for wrong in ["", "yesterday", "1994-11-06"] {
            assert_eq!((http_ms(wrong), rfc3339_ms(wrong)), (None, None), "{wrong}");
        }
    }
}
