"""Ranks that save together: one step, one outcome, one error."""

import collections
import dataclasses
import datetime
import multiprocessing
import os
import random
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.managers import of_ranks, outcome, whole_and_shard
from tests.support.ranks import run_ranks, started
from torchobj import StoreConfig, exceptions
from torchobj.checkpoint import CheckpointManager, RngState, StorageWriter
from torchobj.checkpoint.state.staging import Stager
from torchobj.checkpoint.steps import state_content
from torchobj.checkpoint.steps.pending_save import PendingSave
from torchobj.ranks import meeting as ranks

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/run"


class Own:
    """An object whose `state_dict` succeeds on one rank only."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            raise exceptions.ConfigError("rank 1 has none")
        return {}

    def load_state_dict(self, state):
        raise AssertionError("is never restored")


class OddError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def odd(*given, **named):
    raise OddError("one", "two")


def saved_by_the_first(rank, url, config):
    manager = of_ranks(url, config)
    torch.manual_seed(rank)
    random.seed(rank)
    state = {"x": torch.full((3,), float(rank)), "rng": RngState()}
    manager.save(1, state)
    outcomes = [manager.steps(), outcome(lambda: manager.save(1, state))]
    handle = manager.save_async(2, state)
    drawn = torch.rand(3), random.random()
    handle.result()
    manager.restore(into=state)
    same = torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    outcomes += [manager.latest(), state["x"].tolist(), same]
    outcomes.append(outcome(lambda: manager.save(3, {"own": Own(rank)})))
    outcomes.append(outcome(lambda: manager.save_async(3, {"x": (lambda: 1) if rank == 0 else 0})))
    state_content.save_counted = odd
    outcomes.append(outcome(lambda: manager.save(3, state)))
    manager.save_async(3, state)
    outcomes.append(outcome(manager.close))
    return outcomes, manager.steps()


def test_the_first_rank_saves_and_all_get_its_outcome(bucket, url):
    first, second = run_ranks(saved_by_the_first, url, bucket.config)
    assert first[1] == second[1] == [1, 2]
    for rank, outcomes in enumerate((first[0], second[0])):
        steps, again, latest, x, same, none, pickled, failed, later = outcomes
        assert (steps, latest, x, same) == ([1], 2, [float(rank)] * 3, True)
        assert again == ("CheckpointError", f"{url}: step 1 is committed already; overwrite=True replaces it")
        assert none == ("ConfigError", "rank 1 has none")
        assert "lambda" in pickled[1]
        assert failed[1].endswith("one and two")
        assert later[1].endswith("one and two")
    assert (first[0][-1][0], second[0][-1][0]) == ("OddError", "CheckpointError")


def restored_with_progress(rank, url, config):
    manager, state = of_ranks(url, config), {"x": torch.ones(3)}
    manager.save(1, state)

    def refuse(progress):
        if rank == 1 and progress.files_done == progress.files_total:
            raise exceptions.ConfigError("the bar is closed")

    return outcome(lambda: manager.restore(into=state, progress=refuse))


def test_an_exception_of_progress_at_the_end_of_a_restore_is_raised_on_all_ranks(bucket, url):
    refused = ("ConfigError", "the bar is closed")
    assert run_ranks(restored_with_progress, url, bucket.config) == [refused, refused]


def grouped(rank, url, config):
    manager = of_ranks(url, config)
    reached, going = threading.Event(), threading.Event()
    real = state_content.save_counted

    def save(*given, **named):
        reached.set()
        assert going.wait(30)
        return real(*given, **named)

    state_content.save_counted = save
    handle = manager.save_async(1, {"x": 1})
    assert rank or reached.wait(30)
    # Meanwhile the program creates its own group, on all ranks in the same order.
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20)))
    going.set()
    handle.result(30)
    lone = dist.new_group([0])
    others = outcome(lambda: type(CheckpointManager(url, config=config, process_group=lone)).__name__)
    different = outcome(lambda: manager.save(5 + rank, {"x": 1}))
    return total.item(), others, different, manager.steps()


def test_a_background_save_creates_no_group_concurrently_with_the_program(bucket, url):
    first, second = run_ranks(grouped, url, bucket.config)
    assert (first[0], first[3]) == (second[0], second[3]) == (2.0, [1])
    assert first[1] == "CheckpointManager"
    assert second[1] == (
        "ConfigError",
        "process_group: this rank is not in it; call this on its ranks only",
    )
    assert first[2] == second[2] == ("ConfigError", "step=6 on rank 1, 5 on rank 0: must be the same on all ranks")


#: Arguments of managers, and calls of them, that must be the same on all ranks: by name, those of each of two ranks.
DIFFERENT = {
    "url": ({}, {"url": "other"}),
    "sharded": ({"sharded": True}, {"sharded": False}),
    "keep_last": ({"keep_last": 2}, {"keep_last": 3}),
    "keep_every": ({"keep_every": 2}, {"keep_every": 4}),
    "keep_best": ({"keep_best": ("loss", "min")}, {"keep_best": ("loss", "max")}),
}

DIFFERENT_CALLS = {
    "step": lambda manager, rank: manager.save(5 + rank, {"x": 1}),
    "overwrite": lambda manager, rank: manager.save(1, {"x": 1}, overwrite=rank == 1),
    "method": lambda manager, rank: (manager.save, manager.save_async)[rank](5, {"x": 1}),
    "step of a restore": lambda manager, rank: manager.restore((1, "latest")[rank], into={"x": 0}),
    "restore": lambda manager, rank: manager.restore(1, into={"x": 0}) if rank else manager.save(1, {"x": 1}),
}

#: Calls of managers that have different arguments.
CALLS = [
    lambda manager, rank: manager.save(1, {"x": 1}),
    lambda manager, rank: manager.save_async(1, {"x": 1}).result(),
    lambda manager, rank: manager.restore(into={"x": 1}),
]


def different(rank, url, config):
    outcomes = {}
    for name, settings in DIFFERENT.items():
        mine = dict(settings[rank])
        manager = of_ranks(url + mine.pop("url", ""), config, **mine)
        outcomes[name] = [outcome(partial(call, manager, rank)) for call in CALLS]
    for sharded in (False, True):
        manager, step = of_ranks(url, config, sharded=sharded), 1 + sharded
        manager.save(step, {"x": 1})
        for name, call in DIFFERENT_CALLS.items():
            outcomes[name, sharded] = [outcome(partial(call, manager, rank))]
        # The ranks can go on.
        assert manager.restore(torch.tensor(step) if rank else step, into={"x": 0}) == {"x": 1}
    return outcomes, manager.steps()


@pytest.mark.filterwarnings("ignore")
def test_ranks_with_different_arguments_get_a_config_error_that_names_both(bucket, url):
    first, second = run_ranks(different, url, bucket.config)
    assert first == second
    outcomes, steps = first
    assert steps == [1, 2]
    for name, errors in outcomes.items():
        word = {"step of a restore": "step", "restore": "method"}.get(name[0], name[0]) if type(name) is tuple else name
        for kind, text in errors:
            assert kind == "ConfigError"
            assert text.startswith(f"{word}=")
            assert "on rank 1" in text
            assert "on rank 0" in text
    assert outcomes["url"][0][1] == f"url='{url}other' on rank 1, '{url}' on rank 0: must be the same on all ranks"


def longer_than_patience(rank, url, config):
    dist.init_process_group("gloo")
    # torch's default timeout for groups, shortened for this test once the ranks are connected.
    timeout = datetime.timedelta(seconds=0.1)
    dist.distributed_c10d._get_default_timeout = lambda backend: timeout
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    manager = of_ranks(url, config)
    real = state_content.save_counted

    def save(*given, **named):
        threading.Event().wait(1.5)
        return real(*given, **named)

    state_content.save_counted = save
    manager.save(1, {"x": 1})
    return manager.steps()


def test_a_save_may_take_longer_than_torchs_default_timeout(bucket, url):
    assert run_ranks(longer_than_patience, url, bucket.config) == [[1], [1]]


class Unanswered(ranks.Ranks):
    """Ranks of which one stops responding after the save."""

    def __init__(self, *, is_first):
        super().__init__()
        self._first = is_first

    @property
    def is_first(self):
        return self._first

    def agree(self, error):
        raise error or ranks.RankGoneError("another rank is gone: connection closed")


def content(manager):
    return manager._content({"x": 1}, copy=None, progress=None)


def test_a_rank_that_stops_after_the_commit_does_not_fail_the_save(url, bucket, caplog):
    manager = CheckpointManager(url, config=bucket.config)
    pending = manager._begun("save", ranks.Ranks(), "wait", 1, None, content=content(manager), overwrite=False)
    pending.stage()
    pending._writers = Unanswered(is_first=True)
    pending.run()
    assert manager.steps() == [1]
    assert "step 1 is committed, but another rank is gone" in caplog.text
    second = manager._begun("save", ranks.Ranks(), "wait", 2, None, content=content(manager), overwrite=False)
    second.stage()
    second._writers = Unanswered(is_first=False)
    with pytest.raises(exceptions.CheckpointError, match="another rank is gone") as caught:
        second.run()
    assert caught.value.__notes__ == ["it is not known whether step 2 was committed: call steps()"]


def busy_on_one_rank(rank, url, config):
    manager = of_ranks(url, config)
    manager.save_async(1, {"x": 1}).result()
    # One rank may still see a save running that another one has seen finish.
    manager._handle._future.done = lambda: rank == 0
    failed = outcome(lambda: manager.save_async(2, {"x": 2}, when_busy="fail"))
    manager.save_async(2, {"x": 2}, when_busy="wait").result()
    return failed, manager.steps()


def test_ranks_that_see_a_save_differently_get_one_outcome(bucket, url):
    outcomes = run_ranks(busy_on_one_rank, url, bucket.config)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == (("CheckpointError", f"{url}: step 1 is still being saved"), [1, 2])


def saved_by_all(rank, url, config):
    dist.init_process_group("gloo")
    manager = of_ranks(url, config, keep_last=2, sharded=True)
    model = torch.nn.Linear(2, 2)
    whole, x = whole_and_shard(1)
    state = {"x": x, "model": model, "step": 1, "rng": RngState()}
    manager.save(1, state)
    outcomes = [outcome(lambda: manager.save(1, state)), outcome(lambda: manager.save_async(2, state, stage=False))]
    handle = manager.save_async(2, state | {"step": 2})
    with torch.no_grad():
        x.to_local().zero_()
        weight = model.weight.clone()
        model.weight.zero_()
    handle.result()
    outcomes.append(torch.equal(manager.restore()["x"], whole))
    assert manager.restore(into=state) is state
    outcomes += [torch.equal(x.full_tensor(), whole), torch.equal(model.weight, weight), state["step"], manager.steps()]
    manager.save(3, state | {"step": 3})
    return [*outcomes, manager.steps(), manager.latest()]


@pytest.mark.providers("s3", "gs")
@pytest.mark.filterwarnings("ignore")
def test_all_ranks_save_their_state_shards_of_a_step(bucket, url):
    first, second = run_ranks(saved_by_all, url, bucket.config)
    assert first == second
    again, unstaged, without, x, weight, step, steps, kept, latest = first
    assert "is committed already" in again[1]
    assert "stage=False" in unstaged[1]
    assert (without, x, weight, step, steps, kept, latest) == (True, True, True, 2, [1, 2], [2, 3], 3)
    manager = CheckpointManager(url, config=bucket.config)
    assert manager.leftovers() == []
    kinds = [(item.key.rsplit("/", 1)[1], item.crc32 is not None) for item in manager._commits.read(3).objects]
    assert {name for name, has_crc32 in kinds if not has_crc32} == {".metadata"}
    assert len(kinds) >= 3


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
    stager, outcomes, addresses = Stager(), [], []
    for number in range(2):
        before = state["plain"] + 0
        with torch.inference_mode(number == 0):
            copied = stager.stage_shard(state)
        for tensor in (state["plain"], state["head"], state["scalar"], *(part.to_local() for part in parts.values())):
            tensor.add_(1)
        state["sparse"].values().add_(1)
        [inner, (again, three)], plain = copied["parts"], copied["plain"]
        outcomes.append([value.full_tensor().equal(before) for value in (*inner.values(), again)])
        outcomes[-1] += [
            plain.equal(before),
            copied["head"].equal(before[:10]),
            copied["head"].untyped_storage().nbytes(),
        ]
        outcomes[-1] += [
            three,
            copied["counts"],
            copied["scalar"].item() - number,
            copied["sparse"].sum().item() - 3 * number,
        ]
        outcomes[-1] += [plain.data_ptr() == copied["tied"].data_ptr(), stager._blocks[0].is_inference()]
        addresses.append({value.to_local().data_ptr() for value in inner.values()} | {plain.data_ptr()})
        del copied, inner, again, plain
    # Tensors of GPUs are copied to the CPU, and must not be moved back.
    mesh._device_type = "cuda"
    copied = stager.stage_shard(parts)
    return outcomes, addresses[0] == addresses[1], {part.to_local().device.type for part in copied.values()}


@pytest.mark.filterwarnings("ignore")
def test_staged_copies_of_state_shards_reuse_their_memory():
    for outcomes, same_memory, devices in run_ranks(copied_twice):
        expected = [True] * 5 + [40, 3, collections.Counter("aab"), 5.0, 3.0, True, False]
        assert outcomes == [expected] * 2
        assert {type(each[7]) for each in outcomes} == {collections.Counter}
        assert same_memory
        assert devices == {"cpu"}


def failed_on_one(rank, url, config):
    dist.init_process_group("gloo")
    # The second rank cannot write.
    s3, gcs = (dataclasses.replace(each, endpoint_url="http://127.0.0.1:9") for each in (config.s3, config.gcs))
    manager = of_ranks(url, config, sharded=True)
    if rank != 0:
        manager._config = StoreConfig(s3=s3, gcs=gcs, max_attempts=1)
    _, x = whole_and_shard(1)
    outcomes = [outcome(lambda: manager.save(1, {"x": x}))[0]]
    manager.save_async(1, {"x": x})
    outcomes.append(outcome(manager.close)[0])
    return outcomes, manager.steps(), manager.leftovers()


@pytest.mark.filterwarnings("ignore")
def test_the_error_of_one_rank_is_raised_on_all_and_nothing_is_committed(bucket, url):
    first, second = run_ranks(failed_on_one, url, bucket.config)
    assert first == second == (["StoreConnectionError", "StoreConnectionError"], [], [])


class Deadly:
    """An object whose `state_dict` kills the second rank, while the first may wait for it in a collective."""

    def __init__(self, rank, *, waits=False):
        self.rank, self.waits = rank, waits

    def state_dict(self):
        if self.rank == 1:
            die()
        if self.waits:
            dist.barrier()
        return {}

    def load_state_dict(self, state):
        raise AssertionError("is never restored")


def die(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def published_then_dies(*given):
    real_commit(*given)
    die()


real_commit = PendingSave.commit

#: Where a rank dies: the rank, whether the save is sharded, and what kills it.
DEATHS = {
    "its state": (1, (False, True), None),
    "a collective of its state": (1, (False, True), None),
    "the start": (1, (False, True), (PendingSave, "run", die)),
    "the plan": (1, (True,), (StorageWriter, "prepare_local_plan", die)),
    "the data": (1, (True,), (StorageWriter, "write_data", die)),
    "the data of the first rank": (0, (True,), (StorageWriter, "write_data", die)),
    "the end of the first rank": (0, (True,), (StorageWriter, "finish", die)),
    "after the commit": (0, (False, True), (PendingSave, "commit", published_then_dies)),
}


def left_alone(rank, url, config, sharded, death, background, results, caplog):
    manager = of_ranks(url, config, sharded=sharded)
    manager.save(1, {"x": 1})
    dying, _, patched = DEATHS[death]
    state = {"x": 2}
    if patched is None:
        state["deadly"] = Deadly(rank, waits="collective" in death)
    elif rank == dying:
        setattr(*patched)
    notes = []

    def save():
        try:
            return manager.save_async(2, state).result() if background else manager.save(2, state)
        except exceptions.CheckpointError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    found = outcome(save)
    results.put((found, notes, manager.steps(), [item.key for item in manager.leftovers()], caplog.text))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("death", "sharded"), often(7, [(death, sharded) for death, (_, both, _) in DEATHS.items() for sharded in both])
)
def test_a_killed_rank_is_named_on_the_others_with_what_is_known_of_the_step(
    bucket, url, death, sharded, background, caplog
):
    results = multiprocessing.get_context("fork").Queue()
    dying = DEATHS[death][0]
    with started(left_alone, url, bucket.config, sharded, death, background, results, caplog) as both:
        found, notes, steps, left, text = results.get(timeout=150)
        for rank in both:
            rank.join(150)
    assert both[dying].exitcode == -signal.SIGKILL
    assert both[1 - dying].exitcode == 0
    if death == "the start" and not sharded:
        # Only the first rank saves.
        assert (found, steps) == (None, [1, 2])
        assert "step 2 is committed, but another rank is gone" in text
        return
    assert found[0] == "RankGoneError"
    assert "another rank is gone" in found[1]
    assert steps == ([1, 2] if death == "after the commit" else [1])
    if dying == 0:
        assert notes == ["it is not known whether step 2 was committed: call steps()"]
    else:
        assert left == []
        assert notes == ([] if DEATHS[death][2] is None else ["step 2 was not committed"])


def restored_alone(rank, url, config, sharded, results):
    manager = of_ranks(url, config, sharded=sharded)
    manager.save(1, {"x": 1})
    if rank == 1:
        manager._found = manager._check_restore = die
    results.put(outcome(lambda: manager.restore(into={"x": 2})))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_is_killed_in_a_restore_is_named_on_the_others(bucket, url, sharded):
    results = multiprocessing.get_context("fork").Queue()
    with started(restored_alone, url, bucket.config, sharded, results):
        name, text = results.get(timeout=150)
    assert name == "RankGoneError"
    assert "another rank is gone" in text
