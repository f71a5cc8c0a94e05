//! Parses the head of a response in place. Does no I/O.

use torchobj_core::error::ErrorKind;

use super::Failure;
use super::failure::NEEDS_TLS;

/// Maximum number of headers. S3 sends about 12, plus one for each entry of metadata.
const MAX_HEADERS: usize = 128;

/// The first bytes of an alert, with which a server of TLS answers a plain request (RFC 8446, section 5.1).
const TLS_ALERT: [u8; 2] = [21, 3];

/// Start and end of the name and of the value of a header, in the bytes of a head.
type Span = (u16, u16, u16, u16);

/// How the end of a body is determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// The response has no body.
    Empty,
    /// The body has this many bytes.
    Length(u64),
    /// The body is chunked.
    Chunked,
    /// The body ends when the connection closes.
    UntilClosed,
}

/// A parsed head, as offsets into its bytes. Reused for the next response.
#[derive(Clone)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) framing: Framing,
    pub(super) keep_alive: bool,
    /// Length of the head in bytes.
    pub(super) end: usize,
    spans: Vec<Span>,
}

impl Head {
    pub(super) fn new() -> Self {
        Self { status: 0, framing: Framing::Empty, keep_alive: false, end: 0, spans: Vec::new() }
    }

    /// Parses the head at the start of `bytes`. Returns false if it is incomplete. `bodiless`: the response is to a HEAD.
    pub(super) fn parse(&mut self, bytes: &[u8], bodiless: bool) -> Result<bool, Failure> {
        let malformed = Failure::new(ErrorKind::Protocol, "the head of the response is malformed");
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        self.end = match response.parse(bytes) {
            Ok(httparse::Status::Complete(end)) => end,
            Ok(httparse::Status::Partial) => return Ok(false),
            Err(_) if bytes.starts_with(&TLS_ALERT) => {
                let failure = Failure::new(ErrorKind::InvalidRequest, "the server answered a plain request with TLS");
                return Err(Failure { hint: Some(NEEDS_TLS), ..failure });
            }
            Err(_) => return Err(malformed),
        };
        self.status = response.code.unwrap_or_default();
        self.keep_alive = response.version == Some(1);
        let mut length: Option<u64> = None;
        let mut encoded = false;
        let mut chunked = false;
        self.spans.clear();
        let origin = bytes.as_ptr() as usize;
        for header in response.headers.iter() {
            if header.name.eq_ignore_ascii_case("content-length") {
                // `parse` accepts a sign.
                let digits =
                    std::str::from_utf8(header.value).ok().map(str::trim).filter(|text| !text.starts_with('+'));
                let value = digits.and_then(|digits| digits.parse().ok());
                match (value, length) {
                    (Some(value), None) => length = Some(value),
                    (Some(value), Some(before)) if value == before => {}
                    _ => return Err(malformed),
                }
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                encoded = true;
                // Only the last encoding determines the end of the body (RFC 9112, section 6.3).
                let last = header.value.rsplit(|byte| *byte == b',').next().unwrap_or_default();
                chunked = last.trim_ascii().eq_ignore_ascii_case(b"chunked");
            } else if header.name.eq_ignore_ascii_case("connection") {
                for token in header.value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
                    if token.eq_ignore_ascii_case(b"close") {
                        self.keep_alive = false;
                    } else if token.eq_ignore_ascii_case(b"keep-alive") {
                        self.keep_alive = true;
                    }
                }
            }
            let name = header.name.as_ptr() as usize - origin;
            let value = if header.value.is_empty() { self.end } else { header.value.as_ptr() as usize - origin };
            let span = (name, name + header.name.len(), value, value + header.value.len());
            let narrow = |at: usize| u16::try_from(at).ok();
            let (Some(a), Some(b), Some(c), Some(d)) = (narrow(span.0), narrow(span.1), narrow(span.2), narrow(span.3))
            else {
                return Err(malformed);
            };
            self.spans.push((a, b, c, d));
        }
        // Another recipient may take the length for the end of the body (RFC 9112, section 6.3).
        self.keep_alive &= !(encoded && length.is_some());
        self.framing = match length {
            _ if bodiless || matches!(self.status, 100..=199 | 204 | 304) => Framing::Empty,
            // HTTP/1.0 has no transfer encodings (RFC 9112, section 6.1).
            _ if encoded && response.version != Some(1) => return Err(malformed),
            _ if chunked => Framing::Chunked,
            Some(length) if !encoded => Framing::Length(length),
            _ => Framing::UntilClosed,
        };
        Ok(true)
    }

    /// The value of the first header `name` whose value is UTF-8, from the parsed bytes.
    pub(super) fn header<'a>(&self, bytes: &'a [u8], name: &str) -> Option<&'a str> {
        self.spans.iter().find_map(|&(a, b, c, d)| {
            let known = &bytes[usize::from(a)..usize::from(b)];
            let value = &bytes[usize::from(c)..usize::from(d)];
            known.eq_ignore_ascii_case(name.as_bytes()).then(|| std::str::from_utf8(value).ok())?
        })
    }

    /// Names and values of the headers, from the parsed bytes. Skips values that are not UTF-8.
    pub(super) fn headers<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.spans.iter().filter_map(move |&(a, b, c, d)| {
            let name = std::str::from_utf8(&bytes[usize::from(a)..usize::from(b)]).ok()?;
            let value = std::str::from_utf8(&bytes[usize::from(c)..usize::from(d)]).ok()?;
            Some((name, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, bodiless: bool) -> (Head, bool) {
        let mut head = Head::new();
        let done = head.parse(text.as_bytes(), bodiless).unwrap();
        (head, done)
    }

    #[test]
    fn the_head_determines_the_framing_of_the_body() {
        for (text, bodiless, framing) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", false, Framing::Length(12)),
            ("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", true, Framing::Empty),
            ("HTTP/1.1 204 No Content\r\n\r\n", false, Framing::Empty),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n", false, Framing::Chunked),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n", false, Framing::Chunked),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", false, Framing::UntilClosed),
            ("HTTP/1.0 200 OK\r\n\r\n", false, Framing::UntilClosed),
            ("HTTP/1.1 200 OK\r\ncontent-length: 7\r\nContent-Length: 7\r\n\r\n", false, Framing::Length(7)),
        ] {
            let (head, done) = parse(text, bodiless);
            assert!(done && head.framing == framing && head.end == text.len(), "{text}: {:?}", head.framing);
        }
    }

    #[test]
    fn the_head_determines_whether_the_connection_is_kept_alive() {
        for (text, keep) in [
            ("HTTP/1.1 200 OK\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nConnection: foo, Close\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: x\r\nConnection: keep-alive\r\n\r\n", false),
        ] {
            assert_eq!(parse(text, false).0.keep_alive, keep, "{text}");
        }
    }

    #[test]
    fn an_incomplete_head_needs_more_bytes_and_a_malformed_one_is_an_error() {
        assert!(!parse("HTTP/1.1 200 OK\r\nContent-Le", false).1);
        for text in [
            "HTTQ/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        ] {
            let failure = Head::new().parse(text.as_bytes(), false).unwrap_err();
            assert_eq!(failure.kind, ErrorKind::Protocol, "{text}");
        }
    }

    #[test]
    fn headers_have_their_names_and_values() {
        let text = "HTTP/1.1 200 OK\r\nETag: \"a\"\r\nEmpty:\r\nX-Amz-Meta-A: b  c\r\n\r\nbody";
        let (head, _) = parse(text, false);
        let headers: Vec<_> = head.headers(text.as_bytes()).collect();
        assert_eq!(headers, [("ETag", "\"a\""), ("Empty", ""), ("X-Amz-Meta-A", "b  c")]);
    }
}
