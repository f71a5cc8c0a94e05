"""Errors of the JSON API: reasons, statuses and documents. The modules that check and perform requests raise them.

Source: GCS reference, "HTTP status and error codes for JSON".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..errors import RequestError

# reason: (status, message)
ERRORS: Mapping[str, tuple[int, str]] = {
    "authError": (401, "Invalid Credentials"),
    "backendError": (503, "We encountered an internal error. Please try again."),
    "conditionNotMet": (412, "At least one of the pre-conditions you specified did not hold."),
    "conflict": (409, "Your previous request to create the named bucket succeeded and you already own it."),
    "forbidden": (403, "Forbidden"),
    "gone": (410, "The upload session is gone."),
    "internalError": (500, "We encountered an internal error. Please try again."),
    "invalid": (400, "Invalid Value"),
    "methodNotAllowed": (405, "The method is not allowed on this resource."),
    "notFound": (404, "Not Found"),
    "notImplemented": (501, "Not Implemented"),
    "notModified": (304, "Not Modified"),
    "objectUnderActiveHold": (403, "The object is under an active hold and cannot be deleted or overwritten."),
    "parseError": (400, "Parse Error"),
    "rateLimitExceeded": (429, "The rate of requests exceeds the limit. Please reduce it."),
    "requestTimeout": (408, "The request timed out."),
    "requestedRangeNotSatisfiable": (416, "Request range not satisfiable"),
    "required": (400, "Required"),
    "retentionPolicyNotMet": (403, "The object is subject to the bucket's retention policy."),
}


class GcsError(RequestError):
    """An error whose code is a reason of GCS; `parameter` is the query parameter that caused it."""

    def __init__(
        self,
        reason: str,
        message: str | None = None,
        *,
        status: int | None = None,
        parameter: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
        closes: bool = False,
    ) -> None:
        known_status, known_message = ERRORS.get(reason, (500, reason))
        known_status = known_status if status is None else status
        super().__init__(known_status, reason, message or known_message, headers=headers, closes=closes)
        self.parameter = parameter


def usual_reason(status: int) -> str:
    """Returns the reason of a scripted error whose rule has only a status."""
    preferred = {400: "invalid", 403: "forbidden"}
    if status in preferred:
        return preferred[status]
    return next((reason for reason, (known, _) in ERRORS.items() if known == status), "backendError")


def error_document(error: RequestError) -> bytes:
    """Returns the JSON body of an error."""
    # Errors of `wire` have codes as BadRequest; reasons begin with a lower-case letter.
    reason = error.code[:1].lower() + error.code[1:]
    entry = {"message": error.message, "domain": "global", "reason": reason}
    if isinstance(error, GcsError) and error.parameter is not None:
        entry |= {"locationType": "parameter", "location": error.parameter}
    elif error.status == 401:
        entry |= {"locationType": "header", "location": "Authorization"}
    document = {"error": {"code": error.status, "message": error.message, "errors": [entry]}}
    return json.dumps(document, indent=1).encode()
