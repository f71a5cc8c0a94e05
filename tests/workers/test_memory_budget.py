"""`set_memory_budget` after the system refused the memory of the arena."""

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.reading.reader import DatasetReader
from torchobj.workers import memory_budget


@pytest.fixture
def refused(monkeypatch):
    """The sizes requested from a system that refuses all of them."""
    asked = []

    def refuse(size):
        asked.append(size)
        raise OSError("the arena needs more than files of this process may have (ulimit -f)")

    monkeypatch.setattr(_torchobj, "start_prefetcher", refuse)
    monkeypatch.setattr(_torchobj, "prefetch_stats", dict)
    monkeypatch.setattr(memory_budget, "_refused", type(memory_budget._refused)())
    monkeypatch.setattr(memory_budget, "_chosen", 8 << 20)
    return asked


class OfSize(DatasetReader):
    """A reader whose source is its budget."""

    def _create_source(self, budget):
        return budget


def test_a_refusal_holds_until_the_budget_is_set(refused, caplog):
    made = OfSize()
    for _ in range(3):
        assert made.source() is None
    assert refused == [8 << 20]
    assert len(caplog.messages) == 1
    torchobj.set_memory_budget(4 << 20)
    assert not memory_budget.prefetcher_is_refused()
    for _ in range(3):
        assert made.source() is None
    # Requested again, refused again, and warned about again.
    assert refused == [8 << 20, 4 << 20]
    assert memory_budget.prefetcher_is_refused()
    assert len(caplog.messages) == 2


def test_setting_the_budget_uses_memory_that_has_become_available(refused, monkeypatch):
    made = OfSize()
    assert made.source() is None
    monkeypatch.setattr(_torchobj, "start_prefetcher", lambda size: None)
    assert made.source() is None
    torchobj.set_memory_budget(8 << 20)
    assert made.source() == 8 << 20
