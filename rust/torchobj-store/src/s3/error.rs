//! Parses and classifies error responses of S3. Does no I/O.

use std::borrow::Cow;

use torchobj_core::error::{ErrorKind, Operation};

use super::xml;
use crate::config::{Checksum, S3Config};
use crate::http::{CHANGED, ErrorResponse, Refusal, kind_of_status, sanitize};

/// The XML document of an error.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorDocument {
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
    pub(super) request_id: Option<String>,
    pub(super) region: Option<String>,
    storage_class: Option<String>,
    access_tier: Option<String>,
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
                Some(&"StorageClass") => &mut error.storage_class,
                Some(&"AccessTier") => &mut error.access_tier,
                _ => return,
            };
            if field.is_none() {
                *field = text.map(str::to_owned);
            }
        });
        error
    }
}

/// Refusals that are no permission problem although their status may be 403, and codes that a response with status 200 may
/// contain: a retry would fail again (API reference, "Error responses").
const PERMANENT: [&str; 13] = [
    "AccountProblem",
    "AllAccessDisabled",
    "EntityTooLarge",
    "EntityTooSmall",
    "InvalidArgument",
    "InvalidObjectState",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidPayer",
    "InvalidRequest",
    "InvalidStorageClass",
    "MalformedXML",
    "NotSignedUp",
];

/// The next step if the clock of this machine is wrong.
pub(super) const CLOCK: &str = "set the clock of this machine";

/// Classifies a failure by its status and code.
pub(super) fn kind_of(operation: Operation, status: u16, code: Option<&str>) -> ErrorKind {
    match code {
        Some("NoSuchKey") => return ErrorKind::NotFound,
        Some("NoSuchBucket" | "InvalidBucketName") => return ErrorKind::NoBucket,
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
        Some("AccessDenied" | "AccessDeniedException" | "KMS.AccessDeniedException") => return ErrorKind::AccessDenied,
        Some("KMS.ThrottlingException" | "KMS.LimitExceededException") => return ErrorKind::Throttled,
        Some("KMS.KeyUnavailableException" | "KMS.DependencyTimeoutException" | "KMS.KMSInternalException") => {
            return ErrorKind::Server;
        }
        Some(code) if code.starts_with("KMS.") || PERMANENT.contains(&code) => return ErrorKind::InvalidRequest,
        Some("PreconditionFailed") => return kind_of_status(operation, 412),
        Some("RequestTimeout") => return ErrorKind::Timeout,
        Some("RequestTimeTooSkewed") => return ErrorKind::ClockSkew,
        Some("ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired") => {
            return ErrorKind::ExpiredCredentials;
        }
        // The second is what versitygw returns, with status 404.
        Some(
            "InvalidAccessKeyId"
            | "XAdminUserNotFound"
            | "SignatureDoesNotMatch"
            | "InvalidToken"
            | "InvalidSecurity"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException",
        ) => {
            return ErrorKind::Credentials;
        }
        Some("AuthorizationHeaderMalformed" | "PermanentRedirect" | "IllegalLocationConstraintException") => {
            return ErrorKind::Misaddressed;
        }
        Some("BadDigest" | "XAmzContentChecksumMismatch" | "IncompleteBody") => return ErrorKind::Integrity,
        Some("KeyTooLongError" | "InvalidURI") => return ErrorKind::InvalidKey,
        Some("NotImplemented" | "MethodNotAllowed") => return ErrorKind::Unsupported,
        _ => {}
    }
    kind_of_status(operation, status)
}

/// The next step for the user, if there is one.
fn hint(
    operation: Operation,
    kind: ErrorKind,
    status: u16,
    document: &ErrorDocument,
    config: &S3Config,
) -> Option<String> {
    let writes = matches!(operation, Operation::Put | Operation::PutPart | Operation::BeginUpload | Operation::Commit);
    let reads = matches!(operation, Operation::Get | Operation::Head);
    let hint = match (kind, document.code.as_deref()) {
        (_, Some("InvalidObjectState")) => return Some(archived(document)),
        (_, Some("AccountProblem" | "AllAccessDisabled" | "InvalidPayer" | "NotSignedUp" | "UnauthorizedAccess")) => {
            "the account of the bucket or of the requests is suspended, closed or not signed up: its owner can see why in the \
             billing console, or asks AWS Support"
        }
        (ErrorKind::InvalidRequest, Some(code)) if code.starts_with("KMS.") => {
            "the KMS key of the object or of the bucket cannot be used: check in its account and region that it exists, is \
             enabled and is not pending deletion"
        }
        (ErrorKind::AccessDenied, _) if is_explained(document) => "the message names the missing permission",
        (ErrorKind::AccessDenied, Some("KMS.AccessDeniedException")) => {
            "the credentials need the permission kms:Decrypt to read and kms:GenerateDataKey to write, of the key"
        }
        (ErrorKind::AccessDenied, _) => {
            let mut hint = match reads {
                true => "without the permission s3:ListBucket, S3 also returns this if the object does not exist",
                false => "the credentials do not have permission for this operation",
            }
            .to_owned();
            if !config.requester_pays {
                hint.push_str("; a bucket whose requesters pay needs credentials and S3Options(requester_pays=True)");
            }
            return Some(hint);
        }
        (ErrorKind::Credentials, Some("SignatureDoesNotMatch")) => "check the secret access key",
        (ErrorKind::Credentials, Some("InvalidAccessKeyId" | "XAdminUserNotFound")) => {
            "check that the access key belongs to this endpoint"
        }
        (ErrorKind::Credentials, Some("InvalidToken" | "InvalidSecurity" | "InvalidClientTokenId")) => {
            "the session token (AWS_SESSION_TOKEN) must be whole and the one that was issued with this access key, or unset for \
             a key without one: load all three again, such as by `aws configure export-credentials`"
        }
        (ErrorKind::NoBucket, _) if matches!(operation, Operation::Put | Operation::BeginUpload) => {
            "check the bucket's name and the endpoint, or create the bucket, such as by `aws s3 mb`"
        }
        (ErrorKind::NoBucket, _) => "check the bucket's name and the endpoint",
        (ErrorKind::Changed, _) => CHANGED,
        (ErrorKind::ClockSkew, _) => CLOCK,
        (ErrorKind::Misaddressed, _) => "the bucket is in another region: set region, or omit it",
        (
            ErrorKind::InvalidRequest | ErrorKind::Unsupported,
            None | Some("InvalidRequest" | "InvalidArgument" | "NotImplemented"),
        ) if config.checksum != Checksum::Off && (writes || reads && status == 501) => {
            "if the store does not support checksum headers, set checksum=\"none\""
        }
        (ErrorKind::InvalidRequest, None) if operation == Operation::Head && status == 400 => {
            "a response to HEAD has no reason: check the session token, the region and the key of encryption; `torchobj doctor` \
             sends requests that are answered with one"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// Whether a message names the permission that is missing, as most of AWS do.
fn is_explained(document: &ErrorDocument) -> bool {
    document.message.as_deref().is_some_and(|message| message.contains("is not authorized to perform"))
}

/// The next step for an object of an archive (API reference, "RestoreObject").
fn archived(document: &ErrorDocument) -> String {
    let class =
        document.storage_class.as_deref().map(|class| format!(" in {}", sanitize(class, 50))).unwrap_or_default();
    let tier = document.access_tier.as_deref().map(|tier| format!(", {}", sanitize(tier, 50))).unwrap_or_default();
    // Objects that return to another tier are not copied for a number of days.
    let request = if tier.is_empty() { "Days=7" } else { "{}" };
    format!(
        "the object is archived{class}{tier}: restore it, such as by `aws s3api restore-object --bucket ... --key ... \
         --restore-request '{request}'`, and read it when the restore is done, after minutes to two days"
    )
}

/// Parses an error response.
pub(super) fn refusal(operation: Operation, response: &ErrorResponse<'_>, config: &S3Config) -> Refusal {
    let document = ErrorDocument::parse(response.body);
    let mut kind = kind_of(operation, response.status, document.code.as_deref());
    let mut hint = hint(operation, kind, response.status, &document, config);
    let is_deleted = (response.header)("x-amz-delete-marker").is_some_and(|deleted| deleted == "true");
    if is_deleted && matches!(response.status, 404 | 405) {
        kind = ErrorKind::NotFound;
        hint = Some("the object is deleted, by a delete marker: earlier versions of it may exist".to_owned());
    }
    let request_id = (response.header)("x-amz-request-id").or(document.request_id);
    Refusal { kind, code: document.code, message: document.message, request_id, hint: hint.map(Cow::Owned) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use torchobj_core::error::Error;

    use super::*;

    /// The error of a GET of `s3://b/k`.
    fn error(status: u16, body: &[u8], header: &(dyn Fn(&str) -> Option<String> + Sync)) -> Error {
        let response = ErrorResponse { status, header, body };
        refusal(Operation::Get, &response, &S3Config::default()).into_error(
            Operation::Get,
            "s3://b/k".into(),
            &response,
        )
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
