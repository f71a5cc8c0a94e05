"""A store that asks for fewer requests: it is waited for, and not taken for one that fails."""

import dataclasses

import pytest

import torchobj
from torchobj import exceptions

SLOW_DOWN = {"status": 503, "code": "SlowDown", "headers": {"Retry-After": "0"}}


def store_of(place, **settings):
    return torchobj.Store(place.url, config=dataclasses.replace(place.config, **settings))


@pytest.mark.parametrize(
    ("operation", "action"), [("GetObject", SLOW_DOWN), ("PutObject", {**SLOW_DOWN, "status": 429})]
)
def test_throttling_costs_no_attempt(place, control, operation, action):
    store = store_of(place, max_attempts=2)
    store.put("k", b"before")
    control.faults({"operation": operation, "times": 5, "action": action})
    store.put("k", b"after")
    assert bytes(store.get("k")) == b"after"
    assert control.fault_report()[0]["fired"] == 5


def test_a_server_error_that_says_when_to_come_again_costs_no_attempt(place, control):
    store = store_of(place, max_attempts=2)
    store.put("k", b"body")
    control.faults({"operation": "GetObject", "times": 4, "action": {"status": 500, "headers": {"Retry-After": "0"}}})
    assert bytes(store.get("k")) == b"body"


def test_throttling_is_waited_out_no_longer_than_retries_may_take(place, control):
    store = store_of(place, retry_timeout_s=2.0)
    control.faults({"operation": "GetObject", "action": SLOW_DOWN})
    with pytest.raises(exceptions.ThrottledError, match=r"503 SlowDown.*lower max_in_flight") as caught:
        store.get("k")
    # The waits grow although the store asks for none.
    assert 3 <= caught.value.attempts <= 40


def test_failures_among_throttling_have_their_attempts(place, control):
    store = store_of(place, max_attempts=2)
    store.put("k", b"body")
    control.faults(
        {"operation": "GetObject", "times": 3, "action": SLOW_DOWN},
        {"operation": "GetObject", "times": 1, "action": {"status": 500}},
        {"operation": "GetObject", "times": 3, "action": SLOW_DOWN},
    )
    assert bytes(store.get("k")) == b"body"


def test_a_single_attempt_is_a_single_one(place, control):
    control.faults({"operation": "GetObject", "action": SLOW_DOWN})
    with pytest.raises(exceptions.ThrottledError) as caught:
        store_of(place, max_attempts=1).get("k")
    assert caught.value.attempts == 1
    assert len(control.requests("GetObject")) == 1
