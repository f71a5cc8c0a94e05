"""The meetings of the ranks that save: how often they meet, what they send, and how many requests a save needs."""

import collections
import os

import pytest
import torch
import torch.distributed as dist

from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import of_ranks, outcome
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/run"


def counted(rank, url, config):
    collectives = collections.Counter()

    def count(name):
        real = getattr(dist, name)

        def call(*given, **named):
            collectives[name] += 1
            return real(*given, **named)

        setattr(dist, name, call)

    manager, sharded = of_ranks(url, config), of_ranks(url + "-sharded", config, sharded=True)
    # `RngState.state_dict` is collective itself.
    state = {"model": torch.nn.Linear(2, 2), "step": 1, "own": rank}
    for each in (manager, sharded):
        # Creates its groups.
        each.save_async(0, state).result()
    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
        count(name)
    counts = []
    for each in (manager, sharded):
        each.save(1, state)
        counts.append(dict(collectives))
        each.save_async(2, state).result()
        collectives.subtract(counts[-1])
        counts.append(dict(collectives))
        collectives.clear()
    return counts


@pytest.mark.filterwarnings("ignore")
def test_ranks_meet_four_times_in_a_save_and_twice_more_for_state_shards(bucket, url):
    first, second = run_ranks(counted, url, bucket.config)
    once = {"gather_object": 4, "broadcast_object_list": 4}
    shards = {"gather_object": 6, "broadcast_object_list": 5, "scatter_object_list": 1}
    assert first == second == [once, once, shards, shards]


def saved_once(rank, url, config, step, sharded):
    of_ranks(url, config, sharded=sharded).save(step, {"model": torch.nn.Linear(2, 2), "step": step})


@pytest.mark.providers("s3")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_lists_its_folder_and_the_commits_once(bucket, url, control, sharded):
    run_ranks(saved_once, url, bucket.config, 1, sharded)
    control.clear_requests()
    run_ranks(saved_once, url, bucket.config, 2, sharded)
    operations = collections.Counter(request.operation for request in control.requests())
    # The data, the commit object and the pointer; the commits are also listed for what killed saves left.
    assert operations.pop("PutObject") == (4 if sharded else 3)
    # The commit object of the step and the pointer exist or not; the commit object of the first step is read.
    assert operations == {"ListObjectsV2": 3, "HeadObject": 2, "GetObject": 1}


def forced_to_weights_only(rank, url, config):
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    manager, state = (
        of_ranks(url, config),
        {"model": torch.nn.Linear(2, 2), "own": rank, "tensor": torch.ones(2) * rank},
    )
    manager.save(1, state)
    state["own"] = None
    manager.restore(into=state)
    return state["own"], state["tensor"].tolist()


def test_ranks_save_and_restore_where_torch_unpickles_plain_data_only(bucket, url):
    assert run_ranks(forced_to_weights_only, url, bucket.config) == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]


class UnknownThereError(Exception):
    """An exception whose class exists on the second rank only."""

    def __reduce__(self):
        return unknown_there, ()


def unknown_there():
    if dist.get_rank() == 0:
        raise ModuleNotFoundError("no such module on this rank")
    return UnknownThereError("of the second rank")


class Raising:
    """An object whose `state_dict` raises such an exception on the second rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            raise UnknownThereError("of the second rank")
        return {}

    def load_state_dict(self, state):
        raise AssertionError("is never restored")


def failed_with_an_unknown_error(rank, url, config):
    manager = of_ranks(url, config)
    return outcome(lambda: manager.save(1, {"own": Raising(rank)})), manager.steps()


def test_an_error_that_the_first_rank_cannot_unpickle_is_raised_on_all(bucket, url):
    first, second = run_ranks(failed_with_an_unknown_error, url, bucket.config)
    assert first == (("CheckpointError", "another rank failed: UnknownThereError: of the second rank"), [])
    assert second == (("UnknownThereError", "of the second rank"), [])


class Names(torch.utils.data.Dataset):
    """A dataset whose state has two entries that would have one name in a sharded checkpoint."""

    def state_dict(self):
        return {"a.b": 1, "a": {"b": 2}}

    def load_state_dict(self, state):
        assert state == self.state_dict()


def saved_with_names(rank, url, config):
    manager = of_ranks(url, config, sharded=True)
    return outcome(lambda: manager.save(1, {"data": Names()}))


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_is_kept_for_each_rank_may_have_any_names(bucket, url):
    assert run_ranks(saved_with_names, url, bucket.config) == [None, None]
