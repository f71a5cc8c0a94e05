"""S3's errors: codes, statuses and XML. The modules that check and perform requests raise them.

Statuses and codes are from the S3 API reference, "List of error codes"; comments note deviations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .documents import document, tag

# code: (status, message)
ERRORS: Mapping[str, tuple[int, str]] = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header that you provided is not valid."),
    "BadDigest": (400, "The digest that you specified did not match what was received."),
    "BadRequest": (400, "The request's head is malformed."),
    "BucketAlreadyOwnedByYou": (409, "The bucket that you tried to create already exists, and you own it."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed object size."),
    "ExpiredToken": (400, "The provided token has expired."),
    "HTTPVersionNotSupported": (505, "Only HTTP/1.1 is spoken here."),
    "IllegalLocationConstraintException": (400, "The location constraint is incompatible with the request's region."),
    "IncompleteBody": (400, "The body has another length than the headers announce."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The access key ID that you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidChunkSizeError": (403, "Only the last chunk is allowed to have a size less than 8192 bytes"),
    "InvalidDigest": (400, "The Content-MD5 or checksum value that you specified is not valid."),
    "InvalidEncryptionAlgorithmError": (400, "The encryption request is not valid. The valid value is AES256."),
    "InvalidObjectState": (403, "The operation is not valid for the object's storage class"),
    "InvalidPart": (400, "One or more of the specified parts could not be found."),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidStorageClass": (400, "The storage class that you specified is not valid."),
    "InvalidTag": (400, "The tag provided was not a valid tag."),
    # The reference gives 400 for InvalidToken; this server returns 403, so that clients must decide on the code.
    "InvalidToken": (403, "The provided token is malformed or otherwise invalid."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long"),
    "MalformedTrailerError": (400, "The request contained trailing data that was not well-formed."),
    "MalformedXML": (400, "The XML that you provided was not well formed or did not validate."),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (404, "The specified multipart upload does not exist. It may have been aborted or completed."),
    "NotImplemented": (501, "A parameter that you provided implies functionality that is not implemented."),
    "NotModified": (304, "Not Modified"),
    "PermanentRedirect": (301, "The bucket must be addressed using the specified endpoint."),
    "PreconditionFailed": (412, "At least one of the preconditions that you specified did not hold."),
    "RequestHeaderSectionTooLarge": (400, "Your request header section exceeds the maximum allowed size."),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the server's time is too large."),
    "RequestTimeout": (400, "Your socket connection to the server was not read from or written to in time."),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SignatureDoesNotMatch": (403, "The request signature that we calculated does not match the one you provided."),
    "SlowDown": (503, "Please reduce your request rate."),
    "TooManyRequests": (429, "Please reduce your request rate."),
    "XAmzContentSHA256Mismatch": (400, "The provided x-amz-content-sha256 header does not match what was computed."),
}


class RequestError(Exception):
    """An error response of either protocol; `headers` are added to it, and `closes` ends the connection after it."""

    def __init__(
        self, status: int, code: str, message: str, *, headers: Sequence[tuple[str, str]] = (), closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = list(headers)
        self.closes = closes


class S3Error(RequestError):
    """An error with a code of S3; `details` become elements of its XML."""

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        status: int | None = None,
        details: Mapping[str, str] | None = None,
        headers: Sequence[tuple[str, str]] = (),
        closes: bool = False,
    ) -> None:
        known_status, known_message = ERRORS.get(code, (500, code))
        known_status = known_status if status is None else status
        super().__init__(known_status, code, message or known_message, headers=headers, closes=closes)
        self.details = dict(details or {})


def usual_code(status: int) -> str:
    """Returns the code of a scripted error whose rule has only a status."""
    preferred = {400: "BadRequest", 403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}
    if status in preferred:
        return preferred[status]
    return next((code for code, (known, _) in ERRORS.items() if known == status), "InternalError")


def error_document(error: RequestError, resource: str, request_id: str, host_id: str) -> bytes:
    """Returns the XML body of an error; `request_id` is that of the response's x-amz-request-id."""
    return document(
        "Error",
        tag("Code", error.code),
        tag("Message", error.message),
        *(tag(name, value) for name, value in (error.details.items() if isinstance(error, S3Error) else ())),
        tag("Resource", resource),
        tag("RequestId", request_id),
        tag("HostId", host_id),
        namespace=False,
    )
