"""Ranks find each other's listings by a nonce of the process group and a number that each name is counted by."""

import datetime

import pytest
import torch.distributed

from torchobj.exceptions import TorchobjError
from torchobj.ranks import broadcast


def uses(job, *names):
    return [int(job.use(name).rsplit("/", 1)[1]) for name in names]


def test_the_uses_of_a_name_are_counted_for_each_process_group():
    store = torch.distributed.HashStore()
    first, second = (broadcast._Job(0, store, "a") for _ in range(2))
    assert uses(first, "a", "a", "b", "a") == [1, 2, 1, 3]
    assert uses(second, "a") == [1]
    assert first.nonce != second.nonce
    assert first.use("c") != second.use("c")


def test_a_rank_does_not_take_the_nonce_of_an_earlier_process_group(monkeypatch):
    store = torch.distributed.HashStore()
    old = broadcast._Job(0, store, "a").nonce
    monkeypatch.setattr(broadcast, "_TIMEOUT", datetime.timedelta(seconds=0.1))
    with pytest.raises(TorchobjError, match="rank 0 to list s3://b/a"):
        broadcast._Job(1, store, "s3://b/a")
    monkeypatch.setattr(broadcast, "_nonces", {old})
    new = broadcast._Job(0, store, "a").nonce
    monkeypatch.setattr(broadcast, "_nonces", {old})
    assert broadcast._Job(1, store, "s3://b/a").nonce == new


def test_the_address_of_rank_0_distinguishes_process_groups_for_a_process_that_has_not_seen_the_earlier_one(
    monkeypatch,
):
    store = torch.distributed.HashStore()
    store.set("cpu//0/0", "first")
    broadcast._Job(0, store, "a")
    store.set("cpu//0/0", "second")
    monkeypatch.setattr(broadcast, "_nonces", set())
    monkeypatch.setattr(broadcast, "_TIMEOUT", datetime.timedelta(seconds=0.1))
    with pytest.raises(TorchobjError, match="rank 0 to list s3://b/a"):
        broadcast._Job(1, store, "s3://b/a")
