"""States that differ among ranks: each object is restored as one rank had it, never as a mixture of several ranks."""

import logging

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*was not initialized")


class Extra(torch.nn.BatchNorm1d):
    """A module with statistics and a state of its own."""

    def __init__(self, rank):
        super().__init__(3)
        self.extra = rank
        with torch.no_grad():
            for number, tensor in enumerate(self.state_dict(keep_vars=True).values()):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(10 * rank + number)

    def get_extra_state(self):
        return {"of": self.extra, "text": "x" * 10 * self.extra}

    def set_extra_state(self, state):
        self.extra = state["of"]


class Own:
    """An object of the user: its names, and the types of its values, may differ too."""

    def __init__(self, rank, *, names=False):
        self.state = {"n": rank, "tensor": torch.full((4,), float(rank)), "inner": {"list": [rank, {"x": rank}]}}
        if names:
            self.state |= {f"of {rank}": rank}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Wrapper:
    """An object with the states of a module and of an optimizer, as in the tutorial of torch, and a number of its own."""

    def __init__(self, rank):
        self.module, self.n = Extra(rank), rank
        # One that restores must have a state already.
        self.optimizer = optimizer_of(rank if rank < 2 else 0)

    def state_dict(self):
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "n": self.n}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.n = state["n"]


def optimizer_of(rank):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, lr=1.0 + rank)
    # A rank may have states for parameters that another rank has not used.
    for parameter in parameters[: 2 + rank] if rank < 2 else []:
        parameter.grad = torch.full((3,), 1.0 + rank)
    if rank < 2:
        optimizer.step()
    return optimizer


def seen(value):
    """What distinguishes the states of two ranks, as plain values."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): seen(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [seen(inner) for inner in value]
    return seen(value.state_dict()) if hasattr(value, "state_dict") else value


class Sharded:
    """An object with a sharded tensor, and a number of its own."""

    def __init__(self, rank, value):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = torch.arange(8.0) * value
        self.tensor = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
        self.n = rank

    def state_dict(self):
        return {"tensor": self.tensor, "counts": {"n": self.n}}

    def load_state_dict(self, state):
        self.n = state["counts"]["n"]


#: What a rank saves; `rank=9` is an object to restore into.
KINDS = {
    "module": lambda rank: Extra(rank),
    "module's state": lambda rank: Extra(rank).state_dict(),
    "optimizer": optimizer_of,
    "object": Own,
    "object with other names": lambda rank: Own(rank, names=True),
    "wrapper": Wrapper,
    "number": lambda rank: rank,
    "none or a number": lambda rank: None if rank == 1 else rank,
    "text": lambda rank: "x" * rank,
    "list": lambda rank: [rank, {"n": rank}, torch.tensor(rank)],
    "tensor": lambda rank: torch.full((3,), float(rank)),
    "dict": lambda rank: {"same": 7, "own": rank, "deep": {"tensor": torch.full((2,), float(rank))}},
}
#: Those that are one for all ranks, whose every entry comes from the first.
REPLICATED = ("module", "module's state", "optimizer")


def saved_and_restored(rank, url, sharded):
    dist.init_process_group("gloo")
    results = {}
    with CheckpointManager(url, sharded=sharded, keep_last=None) as manager:
        for step, (name, make) in enumerate(KINDS.items()):
            value = make(rank)
            manager.save(step, {"cur": value, "rest": 3})
            # The structure of the second rank where it may be the first that needs it.
            into = {"cur": make(rank) if name in ("list", "object with other names") else make(9), "rest": 0}
            manager.restore(step, into=into)
            results[name] = seen(value), seen(into["cur"]), into["rest"]
    return results


def restored_by_one(url, sharded, name):
    with CheckpointManager(url, sharded=sharded) as manager:
        into = {"cur": KINDS[name](9)}
        manager.restore(list(KINDS).index(name), into=into)
        return seen(into["cur"])


@pytest.fixture(scope="module", params=[True, False], ids=["sharded", "whole"])
def results(request, tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('saved')}/run"
    return url, request.param, run_ranks(saved_and_restored, url, request.param)


@pytest.mark.parametrize("name", KINDS)
def test_each_object_is_restored_as_one_rank_had_it(results, name):
    url, sharded, (first, second) = results
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    (of_first, at_first, _), (of_second, at_second, rest) = first[name], second[name]
    assert of_first != of_second
    assert at_first == of_first
    assert rest == 3
    if name in REPLICATED:
        assert at_second == of_first
        assert restored_by_one(url, sharded, name) == of_first
    elif name == "wrapper":
        assert at_second == of_first | {"n": 1}
    else:
        assert at_second == of_second


@pytest.mark.parametrize("name", [name for name in KINDS if name not in REPLICATED])
def test_another_number_of_ranks_is_refused_by_name(results, name):
    url, sharded, _ = results
    inner = {"dict": "cur.own", "wrapper": "cur.n"}.get(name, "cur")
    with pytest.raises(exceptions.CheckpointError, match=rf"{inner} was saved by 2 ranks, each its own.*leave it out"):
        restored_by_one(url, sharded, name)
    with CheckpointManager(url, sharded=sharded) as manager:
        assert manager.restore(list(KINDS).index(name), into={"rest": 0}) == {"rest": 3}


def save_losses(rank, url):
    dist.init_process_group("gloo")
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("torchobj").addHandler(handler)
    with CheckpointManager(url) as manager:
        for step in range(2):
            manager.save(step, {"model": torch.nn.Linear(2, 2), "loss": 0.5 + rank})
    return texts


def test_a_value_that_differs_is_named_once_when_it_is_saved_and_when_another_number_of_ranks_restores_it(tmp_path):
    url = f"file://{tmp_path}"
    [text], others = run_ranks(save_losses, url)
    assert text.startswith("loss differs among the ranks: each rank's value is saved")
    assert others == []
    with CheckpointManager(url) as manager:
        with pytest.raises(exceptions.CheckpointError, match="loss was saved by 2 ranks.* leave it out of into="):
            manager.restore()
        assert list(manager.restore(into={"model": torch.nn.Linear(2, 2)})) == ["model"]


def with_shards(rank, url):
    dist.init_process_group("gloo")
    with CheckpointManager(url, sharded=True) as manager:
        manager.save(1, {"cur": Sharded(rank, 1)})
        fresh = Sharded(9, 0)
        manager.restore(into={"cur": fresh})
        return fresh.n, fresh.tensor.full_tensor().tolist()


def test_an_object_with_sharded_tensors_keeps_its_other_values_of_each_rank(tmp_path):
    whole = torch.arange(8.0).tolist()
    assert run_ranks(with_shards, f"file://{tmp_path}/run") == [(0, whole), (1, whole)]


def equal_values(rank, url):
    dist.init_process_group("gloo")
    # Sets have another order in each process, and equal values may share objects on one rank only.
    shared = torch.ones(2)
    value = {"set": {"a", "b", "cc"}, "nan": float("nan"), "tensors": [shared, shared if rank else torch.ones(2)]}
    with CheckpointManager(url) as manager:
        manager.save(1, {"cur": value, "own": Own(3)})


def test_equal_values_are_saved_once_and_restored_by_any_number_of_ranks(tmp_path):
    run_ranks(equal_values, f"file://{tmp_path}/run")
    with CheckpointManager(f"file://{tmp_path}/run") as manager:
        restored = manager.restore()
    assert restored["cur"]["set"] == {"a", "b", "cc"}
    assert restored["own"]["n"] == 3


def given_by_the_first(rank, url, sharded):
    dist.init_process_group("gloo")
    with CheckpointManager(url, sharded=sharded) as manager:
        manager.save(1, {"cur": Own(5), "x": None, "rest": 3} if rank == 0 else {"rest": 3})
        into = {"cur": Own(9), "x": 1, "rest": 0}
        manager.restore(into=into)
    return seen(into["cur"])["n"], into["x"], into["rest"]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_only_the_first_rank_gives_is_restored_on_all(tmp_path, sharded):
    assert run_ranks(given_by_the_first, f"file://{tmp_path}/run", sharded) == [(5, None, 3)] * 2
