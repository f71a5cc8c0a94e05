//! What an answer that is no success means. Reads no sockets.

use torchobj_core::error::{Error, ErrorKind, Operation};

use super::xml;
use crate::http::{Refusal, kind_of_status};

/// What S3 says in the XML of an error.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ServerError {
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
    pub(super) request_id: Option<String>,
    pub(super) region: Option<String>,
}

impl ServerError {
    /// Reads the XML; an answer that is none says nothing.
    pub(super) fn parse(text: &[u8]) -> Self {
        let mut error = Self::default();
        // A text that breaks off half-way still says what stood before.
        let _ = xml::each_text(text, |path, text| {
            let field = match path.last() {
                Some(name) if name == "Code" => &mut error.code,
                Some(name) if name == "Message" => &mut error.message,
                Some(name) if name == "RequestId" => &mut error.request_id,
                Some(name) if name == "Region" => &mut error.region,
                _ => return,
            };
            field.get_or_insert(text);
        });
        error
    }
}

/// What kind of failure a status and a code are.
pub(super) fn kind_of(operation: Operation, status: u16, code: Option<&str>) -> ErrorKind {
    match code {
        Some("NoSuchKey") => return ErrorKind::NotFound,
        Some("NoSuchBucket") => return ErrorKind::NoBucket,
        Some("NoSuchUpload") => return ErrorKind::UploadGone,
        Some(
            "SlowDown"
            | "SlowDownRead"
            | "SlowDownWrite"
            | "ServiceUnavailable"
            | "TooManyRequests"
            | "RequestLimitExceeded",
        ) => {
            return ErrorKind::Throttled;
        }
        Some("InternalError" | "ConditionalRequestConflict" | "OperationAborted") => return ErrorKind::Server,
        Some("RequestTimeout") => return ErrorKind::Timeout,
        Some("RequestTimeTooSkewed") => return ErrorKind::ClockSkew,
        Some("ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired") => {
            return ErrorKind::ExpiredCredentials;
        }
        Some("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken" | "InvalidSecurity") => {
            return ErrorKind::Credentials;
        }
        Some("AuthorizationHeaderMalformed" | "PermanentRedirect" | "IllegalLocationConstraintException") => {
            return ErrorKind::Misaddressed;
        }
        Some("BadDigest" | "XAmzContentChecksumMismatch" | "IncompleteBody") => return ErrorKind::Integrity,
        Some("KeyTooLongError" | "InvalidURI") => return ErrorKind::InvalidKey,
        Some("NotImplemented") => return ErrorKind::Unsupported,
        _ => {}
    }
    kind_of_status(operation, status)
}

/// What the user can do next, where there is something.
pub(super) fn hint(operation: Operation, kind: ErrorKind, code: Option<&str>) -> Option<&'static str> {
    match (kind, code) {
        (ErrorKind::AccessDenied, _) if matches!(operation, Operation::Get | Operation::Head) => {
            Some("without the permission s3:ListBucket this is also what S3 says of an object that does not exist")
        }
        (ErrorKind::AccessDenied, _) => Some("the credentials lack the permission for this"),
        (ErrorKind::Credentials, Some("SignatureDoesNotMatch")) => Some("is the secret key right?"),
        (ErrorKind::Credentials, Some("InvalidAccessKeyId")) => Some("is the access key one of this endpoint?"),
        (ErrorKind::NoBucket, _) => Some("check the bucket's name and the endpoint"),
        (ErrorKind::ClockSkew, _) => Some("the clock of this machine is off"),
        (ErrorKind::Misaddressed, _) => Some("the bucket is in another region: set region, or leave it out"),
        (
            ErrorKind::InvalidRequest | ErrorKind::Unsupported,
            None | Some("InvalidRequest" | "InvalidArgument" | "NotImplemented"),
        ) if matches!(operation, Operation::Put | Operation::PutPart | Operation::BeginUpload | Operation::Commit) => {
            Some("a store that does not know checksum headers wants checksum=\"none\"")
        }
        _ => None,
    }
}

/// The error for an answer.
pub(super) fn error(
    operation: Operation,
    url: String,
    status: u16,
    said: ServerError,
    header: impl Fn(&str) -> Option<String>,
) -> Error {
    let kind = kind_of(operation, status, said.code.as_deref());
    let hint = hint(operation, kind, said.code.as_deref());
    let request_id = header("x-amz-request-id").or(said.request_id);
    let retry_after = header("retry-after");
    let ServerError { code, message, .. } = said;
    let error = Refusal { kind, status, code, message, request_id, retry_after }.into_error(operation, url);
    match hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_error_says_everything_that_the_answer_said() {
        let text = b"<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Please &amp; wait</Message>\
            <RequestId>R1</RequestId><HostId>h</HostId></Error>";
        let said = ServerError::parse(text);
        let header = |name: &str| (name == "retry-after").then(|| "7".to_owned());
        let error = error(Operation::Get, "s3://b/k".into(), 503, said, header);
        assert_eq!(error.kind(), ErrorKind::Throttled);
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
        assert_eq!(error.to_string(), "get s3://b/k: 503 SlowDown: Please & wait, after 1 attempt (request id R1)");
    }

    #[test]
    fn an_answer_that_is_no_xml_is_known_by_its_status() {
        for text in [&b"<html><body>Bad gateway"[..], b"", b"\xff\xfe", b"<a></b>"] {
            let error = error(Operation::Get, "u".into(), 502, ServerError::parse(text), |_| None);
            assert_eq!(error.kind(), ErrorKind::Server);
            assert!(error.to_string().contains("502: Bad Gateway"), "{error}");
        }
    }

    #[test]
    fn the_same_status_means_other_things_to_reads_and_writes() {
        assert_eq!(kind_of(Operation::Get, 412, None), ErrorKind::Changed);
        assert_eq!(kind_of(Operation::Put, 412, None), ErrorKind::Precondition);
        assert_eq!(kind_of(Operation::Commit, 404, Some("NoSuchUpload")), ErrorKind::UploadGone);
        assert_eq!(kind_of(Operation::Commit, 200, Some("SomethingNew")), ErrorKind::Server);
    }

    #[test]
    fn what_a_server_says_is_cut_and_stays_on_one_line() {
        let long = "x".repeat(50_000);
        let text = format!("<Error><Code>{long}</Code><Message>a\r\nERROR forged {long}</Message></Error>");
        let error = error(Operation::Get, "u".into(), 400, ServerError::parse(text.as_bytes()), |_| Some(long.clone()));
        let line = error.to_string();
        assert!(line.len() < 1500 && !line.contains(['\r', '\n']) && line.contains("ERROR forged"), "{line}");
    }
}
