"""The kinds of faults of `faults.py`, as actions of the strict server. Runs nothing."""

from dataclasses import dataclass
from typing import Literal

from tests.strict.control import FaultAction, FaultRule

#: Longer than any timeout: a client that waits for it to end hangs.
_FOR_EVER_S = 600.0
_ERROR_XML = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>InternalError</Code><Message>by script</Message></Error>'
)


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    action: FaultAction
    stall: Literal["first_byte_timeout_s", "idle_timeout_s"] | None = None
    """The timeout that ends it, if the fault is a stall or slow."""
    transient: bool = True
    """Whether a retry of the same request succeeds, which it does not after a final response."""
    s3_only: bool = False
    """Whether only S3 has this response: elsewhere it is final."""

    def is_retried(self, scheme: str) -> bool:
        """Whether a request is retried after it."""
        return self.transient and (scheme == "s3" or not self.s3_only)


def kinds(endpoint: str) -> list[Kind]:
    """Returns every kind, for a server at `endpoint`."""
    wait = {"Retry-After": "1"}
    return [
        Kind("500", {"status": 500}),
        Kind(
            "502 with HTML",
            {"status": 502, "body": "<html>bad gateway</html>", "headers": {"Content-Type": "text/html"}},
        ),
        Kind("503 SlowDown", {"status": 503}),
        Kind("503, Retry-After: 1", {"status": 503, "headers": wait}),
        Kind("429, Retry-After: 0", {"status": 429, "code": "TooManyRequests", "headers": {"Retry-After": "0"}}),
        Kind("503 before the body", {"early_response": 503}),
        Kind("400 RequestTimeout", {"status": 400, "code": "RequestTimeout"}, s3_only=True),
        Kind("403 clock skew", {"status": 403, "code": "RequestTimeTooSkewed"}, transient=False),
        Kind("200 with an error", {"error_in_200": "InternalError"}),
        Kind("200, error as object", {"replace_body": _ERROR_XML}),
        Kind("reset before body", {"reset": "before_head"}),
        Kind("reset after request", {"reset": "after_request"}),
        Kind("closed, no answer", {"no_answer": True}),
        Kind("done, answer lost", {"lose_response": True}),
        Kind("not HTTP", {"garbage_head": True}),
        Kind("head cut short", {"cut_head": 40}),
        Kind("reset in the body", {"cut_body": 0.5, "reset": True}),
        Kind("body cut short", {"cut_body": 0.5}),
        Kind("chunked, cut short", {"cut_body": 0.5, "chunked": True}),
        Kind("HTTP/1.0, cut short", {"cut_body": 0.5, "http_1_0": True}),
        Kind("wrong length", {"shorter_length": 100}),
        Kind("longer than said", {"longer_body": 100}),
        Kind("gzip by a proxy", {"gzip": True}),
        Kind("wrong Content-Range", {"wrong_content_range": True}),
        Kind("range ignored", {"ignore_range": True}),
        Kind("wrong ETag", {"wrong_etag": True}, transient=False),
        Kind("chunked", {"chunked": True}),
        Kind("no length", {"no_length": True}),
        Kind("HTTP/1.0", {"http_1_0": True}),
        Kind("103 first", {"informational": 103}),
        Kind("stale connection", {"close_after": True}),
        Kind("redirect to itself", {"redirect_to": endpoint}),
        Kind("no answer", {"delay_first_byte_s": _FOR_EVER_S}, stall="first_byte_timeout_s"),
        Kind("body stalls", {"stall_body_at": 100, "stall_s": _FOR_EVER_S}, stall="idle_timeout_s"),
        Kind("200 B/s", {"slow_drip": 200.0}, stall="idle_timeout_s"),
        Kind("redirect elsewhere", {"redirect_to": "http://foreign.test:81"}, transient=False),
        Kind("403 AccessDenied", {"status": 403}, transient=False),
        Kind("404 NoSuchKey", {"status": 404, "code": "NoSuchKey"}, transient=False),
        Kind("412", {"status": 412}, transient=False),
        Kind("416", {"status": 416}, transient=False),
    ]


@dataclass(frozen=True)
class Script:
    """A share of all requests has a fault, each of some kinds equally often."""

    names: tuple[str, ...] = ()
    """Those of the kinds."""
    share: float = 0.0
    seed: int = 0

    def rules(self, endpoint: str) -> list[FaultRule]:
        """Returns the rules of a server."""
        chosen = [kind for kind in kinds(endpoint) if kind.name in self.names]
        each = self.share / max(1, len(chosen))
        # The first matching rule decides: later rules see fewer requests.
        return [
            {
                "probability": min(1.0, each / (1.0 - number * each)),
                "seed": self.seed * 1000 + number,
                "action": kind.action,
            }
            for number, kind in enumerate(chosen)
        ]


NO_FAULTS = Script()
