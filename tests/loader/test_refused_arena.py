"""`set_memory_budget` after the system refused the memory of the arena."""

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.datasets import prefetch_source


@pytest.fixture
def refused(monkeypatch):
    """The sizes requested from a system that refuses all of them."""
    asked = []

    def refuse(size):
        asked.append(size)
        raise OSError("the arena needs more than files of this process may have (ulimit -f)")

    monkeypatch.setattr(_torchobj, "start_prefetcher", refuse)
    monkeypatch.setattr(_torchobj, "prefetch_stats", dict)
    monkeypatch.setattr(prefetch_source, "_refused", type(prefetch_source._refused)())
    monkeypatch.setattr("torchobj.datasets.memory_budget._chosen", 8 << 20)
    return asked


def test_a_refusal_holds_until_the_budget_is_set(refused, caplog):
    made = prefetch_source.Source()
    for _ in range(3):
        assert made.native(lambda size: size, None) is None
    assert refused == [8 << 20]
    assert len(caplog.messages) == 1
    torchobj.set_memory_budget(4 << 20)
    assert not prefetch_source.is_refused()
    for _ in range(3):
        assert made.native(lambda size: size, None) is None
    # Requested again, refused again, and warned about again.
    assert refused == [8 << 20, 4 << 20]
    assert prefetch_source.is_refused()
    assert len(caplog.messages) == 2


def test_setting_the_budget_uses_memory_that_has_become_available(refused, monkeypatch):
    made = prefetch_source.Source()
    assert made.native(lambda size: size, None) is None
    monkeypatch.setattr(_torchobj, "start_prefetcher", lambda size: None)
    assert made.native(lambda size: size, None) is None
    torchobj.set_memory_budget(8 << 20)
    assert made.native(lambda size: size, None) == 8 << 20
