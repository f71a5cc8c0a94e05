"""A loader's state has the same structure at every moment, so that a checkpoint of torch.distributed.checkpoint, which
flattens it, can be restored into a fresh loader."""

import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import torchobj
from tests.support.orders import COUNT, KINDS, dataset, elastic, number_of
from tests.support.ranks import run_ranks
from torchobj.checkpoint import CheckpointManager


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(COUNT):
        (folder / f"k{number:02}").write_bytes(bytes([number]) * (100 + number))
    return folder


def structure(state):
    """The names of a state in a distributed checkpoint, with shape and dtype of tensors."""
    flat, _ = flatten_state_dict({"loader": state})
    tensors = {name: (value.shape, value.dtype) for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return set(state), set(flat), tensors


class Counting(torch.utils.data.IterableDataset):
    """An iterable dataset; optionally with a state that contains a tensor and changing keys."""

    def __init__(self, *, has_state):
        self.done, self.resumed = 0, 0
        if has_state:
            self.state_dict, self.load_state_dict = self.state, self.load

    def __iter__(self):
        begin, self.resumed = self.resumed, 0
        for number in range(begin, 20):
            self.done = number + 1
            yield number

    def state(self):
        return {"done": torch.tensor([self.done])} | {f"seen {number}": {} for number in range(self.done)}

    def load(self, state):
        self.resumed = self.done = int(state["done"])


def iterable(folder, **settings):
    return torchobj.ObjectIterableDataset(
        f"file://{folder}/", transform=number_of, shuffle=True, enable_sharding=True, **settings
    )


ITERABLES = {
    "iterable of ours": iterable,
    "iterable without a state": lambda _: Counting(has_state=False),
    "iterable with a state": lambda _: Counting(has_state=True),
}


def loader_of(folder, kind, workers):
    persistent = {"persistent_workers": True} if workers else {}
    if kind in ITERABLES:
        return torchobj.DataLoader(ITERABLES[kind](folder), batch_size=4, num_workers=workers, **persistent)
    return torchobj.DataLoader(dataset(folder), **KINDS[kind](folder), num_workers=workers, **persistent)


def moments(make):
    """States of a loader at different times."""
    loader = make()
    yield "fresh", loader.state_dict()
    iterator = iter(loader)
    yield "begun", loader.state_dict()
    next(iterator)
    yield "first", (first := loader.state_dict())
    next(iterator)
    yield "second", loader.state_dict()
    for _ in iterator:
        last = loader.state_dict()
    yield "last", last
    yield "end", (end := loader.state_dict())
    next(iter(loader))
    yield "next epoch", loader.state_dict()
    for name, state in (("first", first), ("end", end)):
        again = make()
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        yield f"{name} loaded", again.state_dict()
        iterator = iter(again)
        yield f"{name} loaded and begun", again.state_dict()
        next(iterator)
        yield f"{name} resumed", again.state_dict()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", [*KINDS, *ITERABLES])
def test_the_structure_is_always_the_same(folder, kind, workers):
    found = {}
    for moment, state in moments(lambda: loader_of(folder, kind, workers)):
        found[moment] = structure(state)
        # A value that weights_only refuses would be found only at the restore.
        data = io.BytesIO()
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    assert all(each == found["fresh"] for each in found.values()), found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 0) for kind in ("shuffled", "generator", "distributed", "elastic", "torchdata")),
        *itertools.product(["iterable of ours", "iterable with a state"], [0, 2]),
        ("elastic", 2),
        *(pytest.param(k, 2, marks=pytest.mark.matrix) for k in ("shuffled", "generator", "distributed", "torchdata")),
    ],
)
def test_a_sharded_checkpoint_from_mid_epoch_is_restored_into_a_fresh_loader(folder, tmp_path, kind, workers):
    torch.manual_seed(5)
    loader = loader_of(folder, kind, workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with CheckpointManager(f"file://{tmp_path}/run", sharded=True) as manager:
        manager.save(1, {"loader": loader, "weights": torch.ones(3)})
    rest = [str(batch) for batch in iterator]
    torch.manual_seed(6)
    fresh, weights = loader_of(folder, kind, workers), torch.zeros(3)
    with CheckpointManager(f"file://{tmp_path}/run", sharded=True) as manager:
        manager.restore(into={"loader": fresh, "weights": weights})
    assert weights.tolist() == [1, 1, 1]
    assert [str(batch) for batch in fresh] == rest


def of_a_rank(rank, url, folder):
    dist.init_process_group("gloo")

    def make():
        return torchobj.DataLoader(
            dataset(folder), batch_size=4, sampler=elastic(folder, seed=3, num_replicas=None, rank=None)
        )

    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    with CheckpointManager(url, sharded=True) as manager:
        manager.save(1, {"loader": loader, "weights": torch.full((3,), 1.0)})
        rest = [batch.tolist() for batch in iterator]
        fresh = make()
        manager.restore(into={"loader": fresh, "weights": torch.zeros(3)})
    return rest, [batch.tolist() for batch in fresh]


def test_two_ranks_restore_a_sharded_checkpoint_from_mid_epoch(folder, tmp_path):
    for rest, found in run_ranks(of_a_rank, f"file://{tmp_path}/run", folder):
        assert found == rest
        assert len(rest) == 6
