//! Parses and classifies error responses of S3. Does no I/O.

use torchobj_core::error::{ErrorKind, Operation};

use super::xml;
use crate::http::{CHANGED, ErrorResponse, Refusal, kind_of_status};

/// The XML document of an error.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorDocument {
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
    pub(super) request_id: Option<String>,
    pub(super) region: Option<String>,
}

impl ErrorDocument {
    /// Parses the XML. All fields are `None` if the body is not an error document.
    pub(super) fn parse(text: &[u8]) -> Self {
        let mut error = Self::default();
        // An incomplete document keeps the fields before its end.
        let _ = xml::for_each_element(text, |path, text| {
            let field = match path.last() {
                Some(&"Code") => &mut error.code,
                Some(&"Message") => &mut error.message,
                Some(&"RequestId") => &mut error.request_id,
                Some(&"Region") => &mut error.region,
                _ => return,
            };
            if field.is_none() {
                *field = text.map(str::to_owned);
            }
        });
        error
    }
}

/// Classifies a failure by its status and code.
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
        // The second is what versitygw returns, with status 404.
        Some(
            "InvalidAccessKeyId" | "XAdminUserNotFound" | "SignatureDoesNotMatch" | "InvalidToken" | "InvalidSecurity",
        ) => {
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

/// The next step for the user, if there is one.
pub(super) fn hint(operation: Operation, kind: ErrorKind, code: Option<&str>) -> Option<&'static str> {
    match (kind, code) {
        (ErrorKind::AccessDenied, _) if matches!(operation, Operation::Get | Operation::Head) => {
            Some("without the permission s3:ListBucket, S3 also returns this if the object does not exist")
        }
        (ErrorKind::AccessDenied, _) => Some("the credentials do not have permission for this operation"),
        (ErrorKind::Credentials, Some("SignatureDoesNotMatch")) => Some("check the secret access key"),
        (ErrorKind::Credentials, Some("InvalidAccessKeyId" | "XAdminUserNotFound")) => {
            Some("check that the access key belongs to this endpoint")
        }
        (ErrorKind::NoBucket, _) if matches!(operation, Operation::Put | Operation::BeginUpload) => {
            Some("check the bucket's name and the endpoint, or create the bucket, such as by `aws s3 mb`")
        }
        (ErrorKind::NoBucket, _) => Some("check the bucket's name and the endpoint"),
        (ErrorKind::Changed, _) => Some(CHANGED),
        (ErrorKind::ClockSkew, _) => Some("set the clock of this machine"),
        (ErrorKind::Misaddressed, _) => Some("the bucket is in another region: set region, or omit it"),
        (
            ErrorKind::InvalidRequest | ErrorKind::Unsupported,
            None | Some("InvalidRequest" | "InvalidArgument" | "NotImplemented"),
        ) if matches!(operation, Operation::Put | Operation::PutPart | Operation::BeginUpload | Operation::Commit) => {
            Some("if the store does not support checksum headers, set checksum=\"none\"")
        }
        _ => None,
    }
}

/// Parses an error response.
pub(super) fn refusal(operation: Operation, response: &ErrorResponse<'_>) -> Refusal {
    let ErrorDocument { code, message, request_id, .. } = ErrorDocument::parse(response.body);
    let kind = kind_of(operation, response.status, code.as_deref());
    let hint = hint(operation, kind, code.as_deref());
    let request_id = (response.header)("x-amz-request-id").or(request_id);
    Refusal { kind, code, message, request_id, hint }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use torchobj_core::error::Error;

    use super::*;

    /// The error of a GET of `s3://b/k`.
    fn error(status: u16, body: &[u8], header: &(dyn Fn(&str) -> Option<String> + Sync)) -> Error {
        let response = ErrorResponse { status, header, body };
        refusal(Operation::Get, &response).into_error(Operation::Get, "s3://b/k".into(), &response)
    }

    #[test]
    fn an_error_has_the_code_message_and_request_id_of_the_response() {
        let text = b"<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Please &amp; wait</Message>\
            <RequestId>R1</RequestId><HostId>h</HostId></Error>";
        let error = error(503, text, &|name| (name == "retry-after").then(|| "7".to_owned()));
        assert_eq!(error.kind(), ErrorKind::Throttled);
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
        assert_eq!(error.to_string(), "get s3://b/k: 503 SlowDown: Please & wait, after 1 attempt (request id R1)");
    }

    #[test]
    fn a_response_without_an_error_document_is_classified_by_its_status() {
        for text in [&b"<html><body>Bad gateway"[..], b"", b"\xff\xfe", b"<a></b>"] {
            let error = error(502, text, &|_| None);
            assert_eq!(error.kind(), ErrorKind::Server);
            assert!(error.to_string().contains("502: Bad Gateway"), "{error}");
        }
    }

    #[test]
    fn the_kind_of_a_status_depends_on_the_operation() {
        assert_eq!(kind_of(Operation::Get, 412, None), ErrorKind::Changed);
        assert_eq!(kind_of(Operation::Put, 412, None), ErrorKind::Precondition);
        assert_eq!(kind_of(Operation::Commit, 404, Some("NoSuchUpload")), ErrorKind::UploadGone);
        assert_eq!(kind_of(Operation::Commit, 200, Some("SomethingNew")), ErrorKind::Server);
    }

    #[test]
    fn a_long_message_of_a_server_is_truncated_to_one_line() {
        let long = "x".repeat(50_000);
        let text = format!("<Error><Code>{long}</Code><Message>a\r\nERROR forged {long}</Message></Error>");
        let error = error(400, text.as_bytes(), &|_| Some(long.clone()));
        let line = error.to_string();
        assert!(line.len() < 1500 && !line.contains(['\r', '\n']) && line.contains("ERROR forged"), "{line}");
    }
}
