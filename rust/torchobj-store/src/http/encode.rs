//! Percent-encoding of paths and queries. Encodes all bytes except the unreserved ones of RFC 3986.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const RESERVED_IN_PATH: &AsciiSet = &RESERVED.remove(b'/');

/// Appends an object's key as a request path. Keys are raw: `a//b`, `..` and `%41` stay what they are.
pub(crate) fn key_into(out: &mut Vec<u8>, key: &str) {
    utf8_percent_encode(key, RESERVED_IN_PATH).for_each(|piece| out.extend_from_slice(piece.as_bytes()));
}

/// Appends a name or a value of a query string.
pub(crate) fn query_into(out: &mut Vec<u8>, text: &str) {
    utf8_percent_encode(text, RESERVED).for_each(|piece| out.extend_from_slice(piece.as_bytes()));
}

/// Decodes a key of a listing with `encoding-type=url`: `%XX`, and `+` for a space.
/// `None` if the text is not a valid encoding of UTF-8.
pub(crate) fn decode_listed(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'%' => {
                // `from_str_radix` accepts a sign.
                let pair = text.get(at + 1..at + 3).filter(|pair| !pair.starts_with('+'))?;
                out.push(u8::from_str_radix(pair, 16).ok()?);
                at += 3;
            }
            b'+' => {
                out.push(b' ');
                at += 1;
            }
            byte => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slashes_and_dots_of_a_key_are_not_encoded() {
        let mut out = Vec::new();
        key_into(&mut out, "a//b/../c d+%🎉");
        assert_eq!(out, b"a//b/../c%20d%2B%25%F0%9F%8E%89");
    }

    #[test]
    fn a_malformed_escape_is_not_decoded() {
        assert_eq!(decode_listed("a%2"), None);
        assert_eq!(decode_listed("a%zz"), None);
        assert_eq!(decode_listed("a%+5"), None);
        assert_eq!(decode_listed("%FF"), None);
    }

    proptest! {
        #[test]
        fn decoding_an_encoded_key_returns_the_key(key in ".{0,64}") {
            let mut out = Vec::new();
            query_into(&mut out, &key);
            prop_assert_eq!(decode_listed(std::str::from_utf8(&out).unwrap()), Some(key));
        }
    }
}
