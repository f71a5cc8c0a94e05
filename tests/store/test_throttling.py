"""A store that throttles requests: the client waits and does not treat it as failing."""

import dataclasses

import pytest

import torchobj
from torchobj import exceptions

SLOW_DOWN = {"status": 503, "code": "SlowDown", "headers": {"Retry-After": "0"}}


def store_of(bucket, **settings):
    return torchobj.Store(bucket.url, config=dataclasses.replace(bucket.config, **settings))


@pytest.mark.parametrize(
    ("operation", "action"), [("GetObject", SLOW_DOWN), ("PutObject", {**SLOW_DOWN, "status": 429})]
)
def test_throttling_costs_no_attempt(bucket, control, operation, action):
    store = store_of(bucket, max_attempts=2)
    store.put("k", b"before")
    control.faults({"operation": operation, "times": 5, "action": action})
    store.put("k", b"after")
    assert bytes(store.get("k")) == b"after"
    assert control.fault_report()[0]["fired"] == 5


def test_a_server_error_with_retry_after_costs_no_attempt(bucket, control):
    store = store_of(bucket, max_attempts=2)
    store.put("k", b"body")
    control.faults({"operation": "GetObject", "times": 4, "action": {"status": 500, "headers": {"Retry-After": "0"}}})
    assert bytes(store.get("k")) == b"body"


def test_throttled_requests_wait_no_longer_than_the_retry_limit(bucket, control):
    store = store_of(bucket, retry_timeout_s=2.0)
    control.faults({"operation": "GetObject", "action": SLOW_DOWN})
    with pytest.raises(exceptions.ThrottledError, match=r"503 SlowDown.*lower max_in_flight") as caught:
        store.get("k")
    # The delays grow although the store requests none.
    assert 3 <= caught.value.attempts <= 40


def test_failures_between_throttled_responses_have_all_attempts(bucket, control):
    store = store_of(bucket, max_attempts=2)
    store.put("k", b"body")
    control.faults(
        {"operation": "GetObject", "times": 3, "action": SLOW_DOWN},
        {"operation": "GetObject", "times": 1, "action": {"status": 500}},
        {"operation": "GetObject", "times": 3, "action": SLOW_DOWN},
    )
    assert bytes(store.get("k")) == b"body"


def test_max_attempts_1_means_a_single_attempt(bucket, control):
    control.faults({"operation": "GetObject", "action": SLOW_DOWN})
    with pytest.raises(exceptions.ThrottledError) as caught:
        store_of(bucket, max_attempts=1).get("k")
    assert caught.value.attempts == 1
    assert len(control.requests("GetObject")) == 1
