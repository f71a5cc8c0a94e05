"""`host_count`: the hosts of a job by the variables of its launcher."""

import pytest

from torchobj.exceptions import ConfigError
from torchobj.ranks.machine import host_count


@pytest.fixture
def launched(monkeypatch):
    def launched(local, world=None):
        for name, value in {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": world}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return launched


@pytest.mark.parametrize(
    ("ranks", "local", "world", "hosts"),
    [
        (16, "8", "16", 2),
        (8, "8", "8", 1),
        (16, "8", None, 2),
        # Ranks of tensor parallelism get the same samples.
        (4, "8", "16", 2),
        (1, None, None, 1),
        (1, None, "1", 1),
    ],
)
def test_hosts_follow_from_the_ranks_of_each(launched, ranks, local, world, hosts):
    launched(local, world)
    assert host_count(ranks) == hosts


@pytest.mark.parametrize(
    ("ranks", "local", "world", "message"),
    [
        (16, None, "16", "not known; set LOCAL_WORLD_SIZE"),
        (2, None, None, "not known; set LOCAL_WORLD_SIZE"),
        (12, "8", "12", "12 ranks cannot be divided"),
        # Accelerate divides the batches of one order.
        (1, "8", "16", "1 ranks cannot be divided"),
        (4, "8", "4", "4 ranks cannot be divided"),
        (4, "0", "4", "LOCAL_WORLD_SIZE='0': must be"),
        (4, "-2", "4", "LOCAL_WORLD_SIZE='-2': must be"),
        (4, "2", "many", "WORLD_SIZE='many': must be"),
        (4, "", "4", "LOCAL_WORLD_SIZE='': must be"),
    ],
)
def test_hosts_that_are_not_known_or_differ_are_an_error(launched, ranks, local, world, message):
    launched(local, world)
    with pytest.raises(ConfigError, match=message):
        host_count(ranks)
