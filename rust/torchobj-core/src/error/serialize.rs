//! Serializes an error for another process of this machine.

use std::time::Duration;

use super::{Error, ErrorKind, Fields, Operation};

/// The ASCII unit separator. Replaced by a space in the fields.
const SEPARATOR: char = '\u{1f}';

const KINDS: [ErrorKind; 26] = [
    ErrorKind::NotFound,
    ErrorKind::NoBucket,
    ErrorKind::AccessDenied,
    ErrorKind::Credentials,
    ErrorKind::Changed,
    ErrorKind::Precondition,
    ErrorKind::Range,
    ErrorKind::InvalidKey,
    ErrorKind::Unsupported,
    ErrorKind::InvalidRequest,
    ErrorKind::Config,
    ErrorKind::Throttled,
    ErrorKind::Server,
    ErrorKind::Connect,
    ErrorKind::Reset,
    ErrorKind::Stale,
    ErrorKind::Timeout,
    ErrorKind::ShortBody,
    ErrorKind::Protocol,
    ErrorKind::Misaddressed,
    ErrorKind::ClockSkew,
    ErrorKind::ExpiredCredentials,
    ErrorKind::UploadGone,
    ErrorKind::Integrity,
    ErrorKind::Io,
    ErrorKind::Cancelled,
];

impl Error {
    /// Serializes the error of a read for [`from_bytes`](Self::from_bytes) in another process. Its source becomes part of
    /// its message; its operation is not included.
    pub fn to_bytes(&self) -> Vec<u8> {
        let fields = &*self.0;
        let kind =
            KINDS.iter().position(|kind| *kind == fields.kind).expect("KINDS has every kind: a test compares them");
        let message = match &fields.source {
            Some(source) if fields.message.is_empty() => source.to_string(),
            Some(source) => format!("{}: {source}", fields.message),
            None => fields.message.clone(),
        };
        let text = |option: &Option<String>| option.clone().unwrap_or_default();
        let parts = [
            kind.to_string(),
            fields.attempts.to_string(),
            fields.elapsed.map_or(String::new(), |elapsed| elapsed.as_millis().to_string()),
            fields.status.map_or(String::new(), |status| status.to_string()),
            fields.url.clone(),
            message,
            text(&fields.code),
            text(&fields.request_id),
            text(&fields.hint),
        ];
        let parts = parts.map(|part| part.replace(SEPARATOR, " "));
        parts.join(&SEPARATOR.to_string()).into_bytes()
    }

    /// Deserializes what [`to_bytes`](Self::to_bytes) wrote. Its operation is `Get`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let parts: Vec<&str> = text.split(SEPARATOR).collect();
        let [kind, attempts, elapsed, status, url, message, code, request_id, hint] = parts[..] else {
            return Self::new(
                ErrorKind::Io,
                Operation::Get,
                "",
                format!("an error that cannot be deserialized: {text}"),
            );
        };
        let option = |part: &str| (!part.is_empty()).then(|| part.to_owned());
        let kind = kind.parse().ok().and_then(|kind: usize| KINDS.get(kind)).copied().unwrap_or(ErrorKind::Io);
        Self(Box::new(Fields {
            kind,
            operation: Operation::Get,
            url: url.to_owned(),
            message: message.to_owned(),
            status: status.parse().ok(),
            code: option(code),
            request_id: option(request_id),
            retry_after: None,
            hint: option(hint),
            attempts: attempts.parse().unwrap_or(1),
            elapsed: elapsed.parse().ok().map(Duration::from_millis),
            source: None,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deserialized_error_has_the_same_kind_and_text() {
        let error = Error::new(ErrorKind::Throttled, Operation::Get, "s3://b/k\u{1f}é", "please wait")
            .with_status(503, Some("SlowDown".into()))
            .with_request_id(Some("ABC".into()))
            .with_attempts(5, Duration::from_millis(12_400))
            .with_source(std::io::Error::other("underneath"))
            .with_hint("lower max_in_flight");
        let arrived = Error::from_bytes(&error.to_bytes());
        assert_eq!(arrived.kind(), error.kind());
        assert_eq!(arrived.to_string(), error.to_string().replace('\u{1f}', " "));
        for kind in KINDS {
            let error = Error::new(kind, Operation::Get, "s3://b/k", "");
            assert_eq!(Error::from_bytes(&error.to_bytes()).kind(), kind);
        }
        assert_eq!(Error::from_bytes(b"what").kind(), ErrorKind::Io);
    }

    #[test]
    fn every_kind_can_be_serialized() {
        // `Cancelled` is the last kind: the test fails if a kind is added that `KINDS` lacks.
        assert_eq!(ErrorKind::Cancelled as usize + 1, KINDS.len());
        assert!(KINDS.iter().enumerate().all(|(index, kind)| *kind as usize == index));
    }
}
