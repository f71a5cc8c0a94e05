"""What `set_budget` does where the system refused the memory for objects that are read ahead."""

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.datasets import source


@pytest.fixture
def refused(monkeypatch):
    """Sizes that were asked of a system that refuses all of them."""
    asked = []

    def refuse(size):
        asked.append(size)
        raise OSError("the arena needs more than files of this process may have (ulimit -f)")

    monkeypatch.setattr(_torchobj, "start_prefetcher", refuse)
    monkeypatch.setattr(_torchobj, "prefetch_stats", dict)
    monkeypatch.setattr(source, "_refused", type(source._refused)())
    monkeypatch.setattr("torchobj.memory._chosen", 8 << 20)
    return asked


def test_a_refusal_holds_until_the_budget_is_set(refused, caplog):
    made = source.Source()
    for _ in range(3):
        assert made.native(lambda size: size, None) is None
    assert refused == [8 << 20]
    assert len(caplog.messages) == 1
    torchobj.set_budget(4 << 20)
    assert not source.is_refused()
    for _ in range(3):
        assert made.native(lambda size: size, None) is None
    # Asked again, refused again, and warned again.
    assert refused == [8 << 20, 4 << 20]
    assert source.is_refused()
    assert len(caplog.messages) == 2


def test_memory_that_the_system_has_now_is_used_when_the_budget_is_set(refused, monkeypatch):
    made = source.Source()
    assert made.native(lambda size: size, None) is None
    monkeypatch.setattr(_torchobj, "start_prefetcher", lambda size: None)
    assert made.native(lambda size: size, None) is None
    torchobj.set_budget(8 << 20)
    assert made.native(lambda size: size, None) == 8 << 20
