"""Concurrent calls: each item has its result or error, and a caller that stops starts no more."""

import threading

import pytest

from torchobj.store.concurrency import concurrently


@pytest.mark.parametrize("max_calls", [1, 2, 16])
def test_each_item_has_its_result_or_error(max_calls):
    outcomes = dict(concurrently(lambda item: 6 // item, range(4), max_calls))
    assert {item: outcomes[item] for item in (1, 2, 3)} == {1: 6, 2: 3, 3: 2}
    assert isinstance(outcomes[0], ZeroDivisionError)


def test_calls_that_did_not_start_are_not_made_after_an_error():
    made = []
    outcomes = concurrently(lambda item: made.append(item) or item / 0, range(100), 2)
    item, error = next(outcomes)
    outcomes.close()
    assert isinstance(error, ZeroDivisionError)
    assert item in (0, 1)
    assert len(made) <= 4


@pytest.mark.parametrize("waits", [True, False])
def test_running_calls_are_waited_for_unless_the_caller_declines(waits):
    started, release, ended = threading.Event(), threading.Event(), []

    def call(item):
        if item == 0:
            return started.wait(10)
        started.set()
        release.wait(10 if not waits else 0.1)
        return ended.append(item)

    outcomes = concurrently(call, range(2), 2, waits=waits)
    assert next(outcomes) == (0, True)
    outcomes.close()
    assert ended == ([1] if waits else [])
    release.set()
