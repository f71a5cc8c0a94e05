//! Parses and classifies error responses of the JSON API. Does no I/O.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use torchobj_core::error::{ErrorKind, Operation};

use crate::http::{CHANGED, ErrorResponse, Refusal, kind_of_status};

/// `{"error": {"message": …, "errors": [{"reason": …}]}}`. Responses to media requests may be plain text instead.
#[derive(Deserialize)]
struct Document {
    error: Details,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    message: Option<String>,
    errors: Vec<Reason>,
}

#[derive(Deserialize)]
struct Reason {
    reason: Option<String>,
}

/// A document that is an error, of any content.
#[derive(Deserialize)]
struct AnyError {
    #[serde(rename = "error")]
    _error: IgnoredAny,
}

/// Whether the body of a response with status 200 is an error. The server may send one after it has begun to respond.
pub(super) fn is_error(body: &[u8]) -> bool {
    serde_json::from_slice::<AnyError>(body).is_ok()
}

/// Refusals with status 403 that are no permission problem ("HTTP status and error codes for JSON").
const PERMANENT: [&str; 7] = [
    "accountDisabled",
    "countryBlocked",
    "objectUnderActiveHold",
    "quotaExceeded",
    "retentionPolicyNotMet",
    "sslRequired",
    "UserProjectAccountProblem",
];

/// Classifies a failure by its status, reason and message ("HTTP status and error codes for JSON").
fn kind_of(operation: Operation, status: u16, reason: Option<&str>, message: &str) -> ErrorKind {
    match (status, reason) {
        (_, Some("rateLimitExceeded" | "userRateLimitExceeded" | "slowDown")) => ErrorKind::Throttled,
        (401, _) => ErrorKind::ExpiredCredentials,
        (403, Some(reason)) if PERMANENT.contains(&reason) => ErrorKind::InvalidRequest,
        // The reason is that of a missing object.
        (404, _) if message.contains("bucket does not exist") => ErrorKind::NoBucket,
        (404, _) if matches!(operation, Operation::List | Operation::ListUploads) => ErrorKind::NoBucket,
        // The reason is that of any invalid argument.
        (400, _) if message.contains("doesn't match calculated") => ErrorKind::Integrity,
        (409, _) => ErrorKind::Server,
        (304, _) => ErrorKind::Changed,
        _ => kind_of_status(operation, status),
    }
}

/// The next step for the user, if there is one.
fn hint(operation: Operation, kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::AccessDenied if matches!(operation, Operation::Get | Operation::Head) => Some(
            "without the permission storage.objects.list, Cloud Storage also returns this if the object does not exist",
        ),
        ErrorKind::AccessDenied => Some(match operation {
            Operation::Delete | Operation::Abort => "this needs the permission storage.objects.delete",
            Operation::List | Operation::ListUploads => "this needs the permission storage.objects.list",
            Operation::ListBuckets => "this needs the permission storage.buckets.list of the project",
            Operation::Put | Operation::PutPart | Operation::BeginUpload => {
                "this needs the permission storage.objects.create, and storage.objects.delete if the object exists"
            }
            _ => {
                "this needs the permissions storage.objects.get and storage.objects.create, and storage.objects.delete if \
                 the object exists"
            }
        }),
        ErrorKind::NoBucket => Some("check the bucket's name and the endpoint"),
        ErrorKind::Changed => Some(CHANGED),
        _ => None,
    }
}

/// Parses an error response.
pub(super) fn refusal(operation: Operation, response: &ErrorResponse<'_>) -> Refusal {
    let details = serde_json::from_slice::<Document>(response.body).map(|document| document.error);
    let (code, message) = match details {
        Ok(Details { message, errors }) => (errors.into_iter().find_map(|error| error.reason), message),
        Err(_) => {
            let text = String::from_utf8_lossy(response.body);
            let text = text.trim();
            (None, (!text.is_empty() && !text.starts_with('<')).then(|| text.to_owned()))
        }
    };
    let kind = kind_of(operation, response.status, code.as_deref(), message.as_deref().unwrap_or_default());
    let hint = match code.as_deref() {
        Some("required") if operation == Operation::ListBuckets => Some("buckets are listed by project: name one"),
        Some("userProjectMissing" | "required") if response.status == 400 => {
            Some("the bucket is requester pays: set GCSOptions(user_project=...) to the project that is billed")
        }
        Some("retentionPolicyNotMet" | "objectUnderActiveHold") => {
            Some("the object can be replaced or deleted when its retention period or hold ends")
        }
        Some("accountDisabled" | "UserProjectAccountProblem") => Some(
            "the billing account of the project that owns the bucket, or of user_project, is disabled: its owner enables it in \
             the Google Cloud console",
        ),
        Some("quotaExceeded") => {
            Some("a quota of the project is used up: the Google Cloud console shows and raises it")
        }
        _ => hint(operation, kind),
    };
    let hint = hint.map(Cow::Borrowed);
    let request_id = (response.header)("x-guploader-uploadid");
    Refusal { kind, code, message, request_id, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(operation: Operation, status: u16, body: &str) -> Refusal {
        refusal(operation, &ErrorResponse { status, header: &|_| None, body: body.as_bytes() })
    }

    #[test]
    fn an_error_has_the_reason_and_message_of_the_response() {
        let body =
            r#"{"error":{"code":429,"message":"slow","errors":[{"domain":"global","reason":"rateLimitExceeded"}]}}"#;
        let Refusal { kind, code, message, .. } = parsed(Operation::Get, 429, body);
        assert_eq!(
            (kind, code.as_deref(), message.as_deref()),
            (ErrorKind::Throttled, Some("rateLimitExceeded"), Some("slow"))
        );
    }

    #[test]
    fn a_plain_text_or_an_html_page_is_classified_by_its_status() {
        let text = parsed(Operation::Get, 404, "No such object: b/k\n");
        assert_eq!((text.kind, text.message.as_deref()), (ErrorKind::NotFound, Some("No such object: b/k")));
        let page = parsed(Operation::Get, 502, "<html>Bad gateway");
        assert_eq!((page.kind, page.message), (ErrorKind::Server, None));
    }

    #[test]
    fn the_kind_depends_on_the_operation_and_the_message() {
        let error =
            |message: &str| format!(r#"{{"error":{{"message":"{message}","errors":[{{"reason":"notFound"}}]}}}}"#);
        let missing = error("The specified bucket does not exist.");
        assert_eq!(parsed(Operation::Get, 404, &missing).kind, ErrorKind::NoBucket);
        assert_eq!(parsed(Operation::List, 404, &error("Not Found")).kind, ErrorKind::NoBucket);
        assert_eq!(parsed(Operation::Get, 404, &error("No such object")).kind, ErrorKind::NotFound);
        assert_eq!(parsed(Operation::Get, 412, "").kind, ErrorKind::Changed);
        assert_eq!(parsed(Operation::Put, 412, "").kind, ErrorKind::Precondition);
        let wrong = error("Provided CRC32C does not match; it doesn't match calculated CRC32C");
        assert_eq!(parsed(Operation::Put, 400, &wrong).kind, ErrorKind::Integrity);
    }
}
