"""Verifies SigV4 signatures of request heads. `payload` verifies bodies, `access` authorises.

Written from the AWS specification ("Authenticating Requests: Using the Authorization Header", S3 API reference), not
from any SDK: the tests let an SDK and this code check each other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from .accounts import Account, Accounts
from .errors import S3Error
from .target import decode, encode, split_query
from .wire import Headers, RequestHead

ALGORITHM = "AWS4-HMAC-SHA256"
# S3 API reference: the request's time must be within 15 minutes of the server's.
MAX_SKEW_S = 15 * 60
_CREDENTIAL = re.compile(r"([^/]+)/([0-9]{8})/([^/]+)/([^/]+)/([^/]+)")
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} +Credential=([^, ]+), *SignedHeaders=([a-z0-9\-_;]+), *Signature=([0-9a-f]{{64}})"
)


@dataclass(frozen=True)
class Authorization:
    """The parsed Authorization header."""

    access_key: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


@dataclass(frozen=True)
class Identity:
    """The signer of a verified request, with what is needed to verify the signatures of its chunks."""

    account: Account
    region: str
    scope: str
    timestamp: str
    signing_key: bytes
    signature: str


def parse_authorization(value: str) -> Authorization:
    """Parses the header; raises AuthorizationHeaderMalformed if any part deviates from the specification."""
    if not value.startswith(ALGORITHM + " "):
        raise S3Error("InvalidRequest", f"The authorization mechanism is not supported. Please use {ALGORITHM}.")
    found = _AUTHORIZATION.fullmatch(value)
    if found is None:
        raise S3Error("AuthorizationHeaderMalformed")
    credential = _CREDENTIAL.fullmatch(found[1])
    if credential is None or credential[5] != "aws4_request":
        raise S3Error("AuthorizationHeaderMalformed", "The Credential is mal-formed.")
    if credential[4] != "s3":
        raise S3Error("AuthorizationHeaderMalformed", f"incorrect service {credential[4]!r}, expecting 's3'")
    names = tuple(found[2].split(";"))
    if list(names) != sorted(set(names)):
        raise S3Error("AuthorizationHeaderMalformed", "SignedHeaders are not sorted or not unique.")
    return Authorization(credential[1], credential[2], credential[3], credential[4], names, found[3])


def canonical_request(head: RequestHead, signed_headers: tuple[str, ...], payload_hash: str) -> str:
    """Returns the canonical request: decoded path and query encoded again exactly once, and the signed headers."""
    path = encode(decode(head.target.partition("?")[0]), keep_slash=True)
    query = sorted((encode(name), encode(value)) for name, value in split_query(head.target))
    headers = (f"{name}:{_canonical_value(head.headers, name)}\n" for name in signed_headers)
    return "\n".join(
        [
            head.method,
            path,
            "&".join(f"{name}={value}" for name, value in query),
            "".join(headers),
            ";".join(signed_headers),
            payload_hash,
        ]
    )


def _canonical_value(headers: Headers, name: str) -> str:
    values = (re.sub(" +", " ", value.strip()) for known, value in headers if known == name)
    return ",".join(values)


def string_to_sign(timestamp: str, scope: str, canonical: str) -> str:
    # Latin-1 restores the original header bytes; path and query are ASCII here.
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    return f"{ALGORITHM}\n{timestamp}\n{scope}\n{digest}"


def derive_signing_key(secret_key: str, scope: str) -> bytes:
    """Returns the key that signs all requests of one account, day, region and service."""
    key = b"AWS4" + secret_key.encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    return key


def sign(signing_key: bytes, text: str) -> str:
    return hmac.digest(signing_key, text.encode(), "sha256").hex()


def _check_time(timestamp: str | None, date: str, now_s: float) -> str:
    if timestamp is None:
        raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    try:
        if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", timestamp):
            raise ValueError(timestamp)
        moment_s = datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise S3Error("AccessDenied", f"x-amz-date {timestamp!r} is not of the form YYYYMMDDTHHMMSSZ") from None
    if abs(moment_s - now_s) > MAX_SKEW_S:
        server_time = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        details = {
            "RequestTime": timestamp,
            "ServerTime": server_time,
            "MaxAllowedSkewMilliseconds": str(MAX_SKEW_S * 1000),
        }
        raise S3Error("RequestTimeTooSkewed", details=details)
    if timestamp[:8] != date:
        message = f"Invalid credential date {date!r}. This date is not the same as x-amz-date: {timestamp[:8]!r}."
        raise S3Error("AuthorizationHeaderMalformed", message)
    return timestamp


def _check_signed_headers(headers: Headers, signed: tuple[str, ...]) -> None:
    must = {name for name, _ in headers if name == "host" or name.startswith("x-amz-")}
    unsigned = sorted(must - set(signed))
    if unsigned:
        message = "There were headers present in the request which were not signed"
        raise S3Error("AccessDenied", message, details={"HeadersNotSigned": ", ".join(unsigned)})


def verify_head(head: RequestHead, accounts: Accounts, now_s: float) -> Identity | None:
    """Verifies the signature of a request's head.

    Returns: who signed it; None where it carries no Authorization (what is then allowed is `access`'s concern).
    Errors: S3Error with the code that S3 gives for each way in which a signature can be wrong.
    """
    value = head.headers.get("authorization")
    if value is None:
        if any(name == "X-Amz-Signature" for name, _ in split_query(head.target)):
            raise S3Error("NotImplemented", "Presigned requests are not implemented.")
        return None
    authorization = parse_authorization(value)
    token = head.headers.get("x-amz-security-token")
    account = accounts.authorise(authorization.access_key, token, now_s)
    timestamp = _check_time(head.headers.get("x-amz-date"), authorization.date, now_s)
    _check_signed_headers(head.headers, authorization.signed_headers)
    payload_hash = head.headers.get("x-amz-content-sha256")
    if payload_hash is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    canonical = canonical_request(head, authorization.signed_headers, payload_hash)
    to_sign = string_to_sign(timestamp, authorization.scope, canonical)
    signing_key = derive_signing_key(account.secret_key, authorization.scope)
    if not hmac.compare_digest(sign(signing_key, to_sign), authorization.signature):
        details = {
            "AWSAccessKeyId": authorization.access_key,
            "StringToSign": to_sign,
            "SignatureProvided": authorization.signature,
            "StringToSignBytes": to_sign.encode().hex(" "),
            "CanonicalRequest": canonical,
            "CanonicalRequestBytes": canonical.encode("latin-1").hex(" "),
        }
        raise S3Error("SignatureDoesNotMatch", details=details)
    return Identity(account, authorization.region, authorization.scope, timestamp, signing_key, authorization.signature)
