"""Selects the scripted fault of each request. `connection` and `sending` inject it.

A rule counts only requests with a verified head: a refused request has no fault and counts for no rule.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields

from .gcs.routing import OPERATIONS as GCS_OPERATIONS
from .routing import OPERATIONS as S3_OPERATIONS

OPERATIONS = S3_OPERATIONS | GCS_OPERATIONS


class MalformedRule(ValueError):
    """A rule that cannot match any request as written: a misspelt name must not make a test pass."""


@dataclass(frozen=True)
class Action:
    """The effect on a selected request; every field that is set applies, in the order of request processing."""

    # Before the request's body is read: respond at once and close, or reset the connection.
    early_response: int | None = None
    # "before_head": reset before the request's body is read; "after_request": after it, with the operation not
    # performed; True: reset once the answer, or what cut_head or cut_body leaves of it, has arrived.
    reset: bool | str = False
    # Close by FIN after the request's body is read, without an answer and with the operation not performed.
    no_answer: bool = False
    # Instead of performing the operation: a response of this status (code, headers and body as given or as usual).
    status: int | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    error_in_200: str | None = None
    # 307 to this scheme and host, with the request's own target.
    redirect_to: str | None = None
    # While performing it.
    ignore_range: bool = False
    # Maximum number of bytes of a chunk of a resumable upload to GCS that are persisted.
    persist_bytes: int | None = None
    lose_response: bool = False
    # In the response's head.
    informational: int | None = None
    delay_first_byte_s: float = 0.0
    wrong_content_range: bool = False
    wrong_etag: bool = False
    wrong_generation: bool = False
    wrong_checksum: bool = False
    chunked: bool = False
    no_length: bool = False
    http_1_0: bool = False
    garbage_head: bool = False
    cut_head: int | None = None
    # Chunked, with this many seconds of white space before the body, as S3 responds to CompleteMultipartUpload.
    white_space_s: float = 0.0
    # In the response's body.
    replace_body: str | None = None
    gzip: bool = False
    corrupt_byte_at: int | None = None
    shorter_length: int = 0
    cut_body: int | float | None = None
    longer_body: int = 0
    stall_body_at: int | None = None
    stall_s: float = 0.0
    slow_drip: float = 0.0
    # After the response.
    close_after: bool = False


NO_FAULT = Action()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_error_status(value: object) -> bool:
    return _is_count(value) and isinstance(value, int) and 300 <= value <= 599


def _is_status(value: object) -> bool:
    return value == 200 or _is_error_status(value)


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "early_response": _is_error_status,
    "reset": lambda value: _is_bool(value) or value in ("before_head", "after_request"),
    "no_answer": _is_bool,
    "status": _is_status,
    "code": _is_text,
    "headers": _is_map,
    "body": _is_text,
    "error_in_200": _is_text,
    "redirect_to": _is_text,
    "ignore_range": _is_bool,
    "persist_bytes": lambda value: _is_count(value) and isinstance(value, int) and value % (256 * 1024) == 0,
    "lose_response": _is_bool,
    "informational": lambda value: value in (100, 102, 103),
    "delay_first_byte_s": _is_amount,
    "wrong_content_range": _is_bool,
    "wrong_etag": _is_bool,
    "wrong_generation": _is_bool,
    "wrong_checksum": _is_bool,
    "chunked": _is_bool,
    "no_length": _is_bool,
    "http_1_0": _is_bool,
    "garbage_head": _is_bool,
    "cut_head": _is_count,
    "replace_body": _is_text,
    "gzip": _is_bool,
    "white_space_s": _is_amount,
    "corrupt_byte_at": _is_count,
    "shorter_length": _is_count,
    # An integer is a number of bytes; a fraction is a share of the body.
    "cut_body": lambda value: _is_count(value) or (isinstance(value, float) and 0 <= value <= 1),
    "longer_body": _is_count,
    "stall_body_at": _is_count,
    "stall_s": _is_amount,
    "slow_drip": lambda value: _is_amount(value) and value != 0,
    "close_after": _is_bool,
}


def parse_action(given: object) -> Action:
    """Returns the action that JSON describes; MalformedRule names an unknown field or one with an invalid value."""
    if not isinstance(given, dict) or not given:
        raise MalformedRule("action: must be an object with at least one field")
    for name, value in given.items():
        check = _CHECKS.get(name)
        if check is None or not check(value):
            raise MalformedRule(f"action.{name}={value!r}: no such field or value")
    return Action(**given)


@dataclass
class Rule:
    """Selects requests: after `skip` matches, up to `times` (None: all), each with `probability`."""

    action: Action
    operation: str | None = None
    key: str | None = None
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    seed: int = 0
    matched: int = 0
    fired: int = 0

    def __post_init__(self) -> None:
        self._pattern = re.compile(self.key, re.DOTALL) if self.key is not None else None
        # A separate generator: the draws of one rule do not depend on other rules.
        self._random = random.Random(self.seed)

    def chooses(self, operation: str, key: str | None) -> bool:
        if self.operation not in (None, operation):
            return False
        if self._pattern is not None and (key is None or self._pattern.search(key) is None):
            return False
        self.matched += 1
        if self.matched <= self.skip or (self.times is not None and self.fired >= self.times):
            return False
        if self.probability < 1.0 and self._random.random() >= self.probability:
            return False
        self.fired += 1
        return True

    def report(self) -> dict[str, object]:
        """Returns the rule as JSON, with the number of requests that it matched and that had its fault."""
        defaults = asdict(NO_FAULT)
        action = {name: value for name, value in asdict(self.action).items() if value != defaults[name]}
        return {spec.name: getattr(self, spec.name) for spec in fields(self)} | {"action": action}


def parse_rule(given: object) -> Rule:
    """Returns the rule that JSON describes; raises MalformedRule if it is invalid."""
    if not isinstance(given, dict):
        raise MalformedRule(f"{given!r}: a rule must be an object")
    unknown = set(given) - {"operation", "key", "skip", "times", "probability", "seed", "action"}
    if unknown or "action" not in given:
        raise MalformedRule(f"rule: unknown fields {sorted(unknown)}, or no action")
    rule = {name: value for name, value in given.items() if name != "action"}
    operation, key, times = rule.get("operation"), rule.get("key"), rule.get("times")
    if operation is not None and operation not in OPERATIONS:
        raise MalformedRule(f"operation={operation!r}: must be null or one of {', '.join(sorted(OPERATIONS))}")
    if not (key is None or _is_text(key)) or not (times is None or _is_count(times)):
        raise MalformedRule("key must be null or a regular expression, times null or a count")
    probability = rule.get("probability", 1.0)
    if not _is_count(rule.get("skip", 0)) or not _is_amount(probability) or probability > 1:
        raise MalformedRule("skip must be a count, probability a number of 0..1")
    if not _is_count(rule.get("seed", 0)):
        raise MalformedRule("seed must be a count")
    try:
        return Rule(parse_action(given["action"]), **rule)
    except re.error as error:
        raise MalformedRule(f"key={key!r}: {error}") from error


class Script:
    """The current rules; the first matching rule determines a request's fault."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def replace(self, given: object) -> None:
        """Replaces all rules with those of a JSON list; keeps the old ones if one is malformed."""
        if not isinstance(given, list):
            raise MalformedRule("the script must be a list of rules")
        self.rules = [parse_rule(rule) for rule in given]

    def clear(self) -> None:
        self.rules = []

    def needs_key(self, operation: str) -> bool:
        """Returns whether a rule for this operation depends on the key."""
        return any(rule.key is not None and rule.operation in (None, operation) for rule in self.rules)

    def choose(self, operation: str, key: str | None) -> tuple[int | None, Action]:
        """Returns the index of the matching rule and its action; (None, NO_FAULT) if none matches."""
        for index, rule in enumerate(self.rules):
            if rule.chooses(operation, key):
                return index, rule.action
        return None, NO_FAULT
