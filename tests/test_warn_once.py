"""Warnings are logged once in their scope, and again in another."""

import mmap

import pytest

from tests.support.forking import in_child
from torchobj.warn_once import FORKED, PROCESS, Once, warn_once
from torchobj.workers.shared_values import SharedEpoch


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    monkeypatch.setattr(PROCESS, "_once", {})


@pytest.mark.parametrize("make", [Once, SharedEpoch, lambda: PROCESS, lambda: FORKED])
def test_a_warning_is_logged_once_for_each_key(make, caplog):
    scope = make()
    for _ in range(2):
        warn_once(scope, "50 %% of %s", "a", key="division")
        warn_once(scope, "all of %s", "b", key="uneven")
    assert caplog.messages == ["50 % of a", "all of b"]


def test_without_a_key_a_message_is_logged_once_for_its_arguments(caplog):
    for _ in range(2):
        for name in ("a", "b"):
            warn_once(PROCESS, "%s of 100", name)
    warn_once(Once(), "100 % without arguments")
    assert caplog.messages == ["a of 100", "b of 100", "100 % without arguments"]


def test_a_forked_child_warns_again_of_what_is_logged_in_each_process():
    once = Once()
    assert [scope.is_first("parent") for scope in (once, PROCESS, FORKED)] == [True] * 3

    def child():
        assert [scope.is_first("parent") for scope in (once, PROCESS, FORKED)] == [False, True, False]
        assert [scope.is_first("child") for scope in (once, PROCESS, FORKED)] == [True] * 3

    assert in_child(child) == "None"
    assert [scope.is_first("child") for scope in (once, PROCESS, FORKED)] == [True, True, False]
