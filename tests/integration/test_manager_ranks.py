"""Ranks that save together: one step, one outcome, one error."""

import collections
import datetime
import logging
import multiprocessing
import os
import random
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks, started
from torchobj import S3Options, StoreConfig, exceptions
from torchobj.checkpoint import CheckpointManager, RngState, divided, ranks, saving
from torchobj.checkpoint import sharded as sharding
from torchobj.checkpoint.snapshot import Snapshots


@pytest.fixture
def url(place):
    return f"{place.url}/run"


def opened(url, config, **settings):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return CheckpointManager(url, config=config, **settings)


def outcome(call):
    """What a call returns, or its error's name and text."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


class Own:
    """A state that can be given on one rank only."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            raise exceptions.ConfigError("rank 1 has none")
        return {}

    def load_state_dict(self, state):
        raise AssertionError("nobody restores this")


class OddError(Exception):
    """An exception that cannot be made again of what it says."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def odd(*given, **named):
    raise OddError("one", "two")


def saved_by_the_first(rank, url, config):
    manager = opened(url, config)
    torch.manual_seed(rank)
    random.seed(rank)
    state = {"x": torch.full((3,), float(rank)), "rng": RngState()}
    manager.save(1, state)
    told = [manager.steps(), outcome(lambda: manager.save(1, state))]
    handle = manager.save_async(2, state)
    drawn = torch.rand(3), random.random()
    handle.result()
    manager.restore(into=state)
    same = torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    told += [manager.latest(), state["x"].tolist(), same]
    told.append(outcome(lambda: manager.save(3, {"own": Own(rank)})))
    told.append(outcome(lambda: manager.save_async(3, {"x": (lambda: 1) if rank == 0 else 0})))
    saving.save = odd
    told.append(outcome(lambda: manager.save(3, state)))
    manager.save_async(3, state)
    told.append(outcome(manager.close))
    return told, manager.steps()


def test_the_first_rank_saves_and_all_have_its_outcome(place, url):
    first, second = run_ranks(saved_by_the_first, url, place.config)
    assert first[1] == second[1] == [1, 2]
    for told in (first[0], second[0]):
        steps, again, latest, x, same, none, pickled, failed, later = told
        assert (steps, latest, x, same) == ([1], 2, [0.0, 0.0, 0.0], True)
        assert again == ("CheckpointError", f"{url}: step 1 is committed already; overwrite=True replaces it")
        assert none == ("ConfigError", "rank 1 has none")
        assert "lambda" in pickled[1]
        assert failed[1].endswith("one and two")
        assert later[1].endswith("one and two")
    assert (first[0][-1][0], second[0][-1][0]) == ("OddError", "CheckpointError")


def grouped(rank, url, config):
    manager = opened(url, config)
    reached, going = threading.Event(), threading.Event()
    real = saving.save

    def save(*given, **named):
        reached.set()
        assert going.wait(30)
        real(*given, **named)

    saving.save = save
    handle = manager.save_async(1, {"x": 1})
    assert rank or reached.wait(30)
    # What the program does meanwhile: a group of its own, on all ranks in the same order.
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20)))
    going.set()
    handle.result(30)
    lone = dist.new_group([0])
    others = outcome(lambda: type(CheckpointManager(url, config=config, process_group=lone)).__name__)
    different = outcome(lambda: manager.save(5 + rank, {"x": 1}))
    return total.item(), others, different, manager.steps()


def test_a_save_in_the_background_makes_no_group_beside_the_programs_own(place, url):
    first, second = run_ranks(grouped, url, place.config)
    assert (first[0], first[3]) == (second[0], second[3]) == (2.0, [1])
    assert first[1] == "CheckpointManager"
    assert second[1] == (
        "ConfigError",
        "process_group: this rank is none of it; only its ranks save, and have a manager",
    )
    assert first[2] == second[2] == ("ConfigError", "step=6: the first rank saves step 5")


def longer_than_patience(rank, url, config):
    # torch's default for groups, made so short that a test may exceed it.
    dist.distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(seconds=1)
    manager = opened(url, config)
    real = saving.save

    def save(*given, **named):
        threading.Event().wait(2.5)
        real(*given, **named)

    saving.save = save
    manager.save(1, {"x": 1})
    return manager.steps()


def test_a_save_may_take_longer_than_torch_waits_for_ranks(place, url):
    assert run_ranks(longer_than_patience, url, place.config) == [[1], [1]]


class Unanswered(ranks.Ranks):
    """Ranks of which one is gone when the save has been done."""

    def __init__(self, *, is_first):
        super().__init__()
        self._first = is_first

    @property
    def is_first(self):
        return self._first

    def agree(self, error):
        raise error or ranks.RankGoneError("another rank is gone: connection closed")


def test_a_rank_that_is_gone_after_the_commit_fails_no_save_that_is_committed(url, place, caplog):
    manager = CheckpointManager(url, config=place.config)
    beginning = saving.begun(manager._commits, 1, overwrite=False)
    folder = f"{url}/{beginning.attempt.folder}"
    data = saving.whole_data({"x": 1}, folder, place.config, manager._snapshots, stage=None)
    given = (manager._commits, manager._rules, beginning)
    saving.run(*given, data, metrics={}, ranks=Unanswered(is_first=True))
    assert manager.steps() == [1]
    assert "step 1 is committed, but another rank is gone" in caplog.text
    with pytest.raises(exceptions.CheckpointError, match="another rank is gone") as caught:
        saving.run(*given, saving.OF_ANOTHER_RANK, metrics={}, ranks=Unanswered(is_first=False))
    assert caught.value.__notes__ == ["whether step 1 was committed is not known: steps() says so"]


def busy_on_one_rank(rank, url, config):
    manager = opened(url, config)
    manager.save_async(1, {"x": 1}).result()
    # To one rank the save may look under way that another saw the end of.
    manager._handle._future.done = lambda: rank == 0
    failed = outcome(lambda: manager.save_async(2, {"x": 2}, when_busy="fail"))
    manager.save_async(2, {"x": 2}, when_busy="wait").result()
    return failed, manager.steps()


def test_ranks_that_see_a_save_differently_decide_as_one(place, url):
    told = run_ranks(busy_on_one_rank, url, place.config)
    assert told[0] == told[1]
    assert told[0] == (("CheckpointError", f"{url}: step 1 is still being saved"), [1, 2])


def whole_and_shard(rank, value):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(16.0).reshape(8, 2) + value
    return whole, distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])


def saved_by_all(rank, url, config):
    dist.init_process_group("gloo")
    manager = opened(url, config, keep_last=2, sharded=True)
    model = torch.nn.Linear(2, 2)
    whole, x = whole_and_shard(rank, 1)
    state = {"x": x, "model": model, "step": 1, "rng": RngState()}
    manager.save(1, state)
    told = [outcome(lambda: manager.save(1, state)), outcome(lambda: manager.save_async(2, state, stage=False))]
    handle = manager.save_async(2, state | {"step": 2})
    with torch.no_grad():
        x.to_local().zero_()
        weight = model.weight.clone()
        model.weight.zero_()
    handle.result()
    told.append(outcome(manager.restore))
    assert manager.restore(into=state) is state
    told += [torch.equal(x.full_tensor(), whole), torch.equal(model.weight, weight), state["step"], manager.steps()]
    manager.save(3, state | {"step": 3})
    return [*told, manager.steps(), manager.latest()]


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_save_their_own_part_of_one_step(place, url):
    first, second = run_ranks(saved_by_all, url, place.config)
    assert first == second
    again, unstaged, without, x, weight, step, steps, kept, latest = first
    assert "is committed already" in again[1]
    assert "stage=False" in unstaged[1]
    assert "give into=" in without[1]
    assert (x, weight, step, steps, kept, latest) == (True, True, 2, [1, 2], [2, 3], 3)
    manager = CheckpointManager(url, config=place.config)
    assert manager.leftovers() == []
    kinds = [(item.key.rsplit("/", 1)[1], item.crc32 is not None) for item in manager._commits.read(3).objects]
    assert {name for name, has_crc32 in kinds if not has_crc32} == {".metadata", "_torchobj_manifest.json"}
    assert len(kinds) >= 4


def copied_twice(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh, large = init_device_mesh("cpu", (2,)), torch.arange(1_500_003.0)
    parts = {
        "uneven": distribute_tensor(large, mesh, [Shard(0)]),
        "everywhere": distribute_tensor(large.clone(), mesh, [Replicate()]),
    }
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "counts": collections.Counter("aab"),
        "scalar": torch.tensor(5.0),
        "head": large.clone()[:10],
    }
    state = {"parts": [parts, (parts["uneven"], 3)], "plain": large.clone(), "tied": None, **odd}
    state["tied"] = state["plain"]
    snapshots, told, addresses = Snapshots(), [], []
    for number in range(2):
        before = state["plain"] + 0
        with torch.inference_mode(number == 0):
            copied = divided.copied(state, snapshots)
        for tensor in (state["plain"], state["head"], state["scalar"], *(part.to_local() for part in parts.values())):
            tensor.add_(1)
        state["sparse"].values().add_(1)
        [inner, (again, three)], plain = copied["parts"], copied["plain"]
        told.append([value.full_tensor().equal(before) for value in (*inner.values(), again)])
        told[-1] += [plain.equal(before), copied["head"].equal(before[:10]), copied["head"].untyped_storage().nbytes()]
        told[-1] += [
            three,
            copied["counts"],
            copied["scalar"].item() - number,
            copied["sparse"].sum().item() - 3 * number,
        ]
        told[-1] += [plain.data_ptr() == copied["tied"].data_ptr(), snapshots._rooms[0].is_inference()]
        addresses.append({value.to_local().data_ptr() for value in inner.values()} | {plain.data_ptr()})
        del copied, inner, again, plain
    # What is computed on GPUs is copied to the CPU, and stays there: no tensor here may be moved to one.
    mesh._device_type = "cuda"
    copied = divided.copied(parts, snapshots)
    return told, addresses[0] == addresses[1], {part.to_local().device.type for part in copied.values()}


@pytest.mark.filterwarnings("ignore")
def test_the_copies_of_a_divided_state_use_the_memory_of_the_last_ones():
    for told, same_memory, devices in run_ranks(copied_twice):
        expected = [True] * 5 + [40, 3, collections.Counter("aab"), 5.0, 3.0, True, False]
        assert told == [expected] * 2
        assert {type(each[7]) for each in told} == {collections.Counter}
        assert same_memory
        assert devices == {"cpu"}


def failed_on_one(rank, url, config):
    dist.init_process_group("gloo")
    # The second rank can write nothing.
    mine = config if rank == 0 else StoreConfig(s3=S3Options(endpoint_url=config.s3.endpoint_url, anonymous=True))
    manager = opened(url, config, sharded=True)
    manager._config = mine
    _, x = whole_and_shard(rank, 1)
    told = [outcome(lambda: manager.save(1, {"x": x}))[0]]
    manager.save_async(1, {"x": x})
    told.append(outcome(manager.close)[0])
    return told, manager.steps(), manager.leftovers()


@pytest.mark.filterwarnings("ignore")
def test_the_error_of_one_rank_is_that_of_all_and_nothing_is_committed(place, url):
    first, second = run_ranks(failed_on_one, url, place.config)
    assert first == second == (["AccessDeniedError", "AccessDeniedError"], [], [])


class Deadly:
    """A state at which the second rank is killed."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state):
        raise AssertionError("nobody restores this")


def left_alone(rank, url, config, sharded, results):
    manager = opened(url, config, sharded=sharded)
    manager.save(1, {"x": 1})
    if sharded and rank == 1:
        sharding.save = lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)
    told = outcome(lambda: manager.save(2, {"x": 2} if sharded else {"x": 2, "deadly": Deadly(rank)}))
    results.put((told, manager.steps(), [item.key for item in manager.leftovers()]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_is_killed_is_an_error_of_the_others_and_no_step(place, url, sharded):
    results = multiprocessing.get_context("fork").Queue()
    with started(left_alone, url, place.config, sharded, results) as both:
        told, steps, left = results.get(timeout=60)
        for rank in both:
            rank.join(30)
    assert [rank.exitcode for rank in both] == [0, -signal.SIGKILL]
    assert told[0] in ("RankGoneError", "RuntimeError", "DistBackendError")
    assert (steps, left) == ([1], [])


def test_a_rank_that_the_saving_job_did_not_have_keeps_its_generators(caplog, monkeypatch):
    state = RngState().state_dict()
    monkeypatch.setattr("torchobj.checkpoint.rng._distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with caplog.at_level(logging.WARNING, "torchobj"):
        before = torch.get_rng_state()
        RngState().load_state_dict(state)
        assert torch.equal(torch.get_rng_state(), before)
    assert "rank 3 keeps its random generators: the checkpoint has those of 1" in caplog.text
    with pytest.raises(exceptions.CheckpointError, match="no state of an RngState"):
        RngState().load_state_dict({"ranks": "[["})


def test_without_torch_distributed_there_is_one_rank():
    alone = ranks.Ranks()
    assert (alone.several, alone.is_first, alone.group, alone.broadcast(3)) == (False, True, None, 3)
    alone.agree(None)
    with pytest.raises(KeyError):
        alone.agree(KeyError("k"))
