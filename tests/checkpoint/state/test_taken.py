"""The states of all ranks in one state: how they are gathered, and how each rank gets its own."""

import pickle

import pytest
import torch

from tests.support.ranks import run_ranks
from torchobj.checkpoint.state.ranks import Ranks
from torchobj.checkpoint.state.taken import own_state, state_to_save, take_state
from torchobj.exceptions import CheckpointError

KEY = "torchobj_states_of_ranks"


class Position(torch.utils.data.Dataset):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class TwoRanks:
    """The second of two ranks."""

    several, count, number, is_first = True, 2, 1, False


def test_a_state_that_contains_itself_is_returned_unchanged():
    state = {"step": 3}
    state["again"] = state
    assert own_state(state, TwoRanks, "x") is state


def test_a_deeply_nested_state_does_not_raise_recursion_error():
    state = {KEY: [1, 2]}
    for _ in range(100_000):
        state = {"inner": state}
    found = own_state(state, TwoRanks, "x")
    while isinstance(found, dict):
        found = found["inner"]
    assert found == 2


@pytest.mark.parametrize("states", [None, 3, "ab", {}, [], ()])
def test_states_of_ranks_that_are_not_a_list_raise_checkpoint_error(states):
    with pytest.raises(CheckpointError, match="x: the states of the ranks"):
        own_state({"loader": {KEY: states}}, TwoRanks, "x")


def test_states_that_cannot_be_compared_raise_checkpoint_error():
    one, other = {}, {}
    one["self"], other["self"] = one, other
    with pytest.raises(CheckpointError, match="saved by 3 ranks"):
        own_state({"loader": {KEY: [one, other, one]}}, TwoRanks, "x")


class Unpicklable:
    def __reduce__(self):
        raise pickle.PicklingError("no pickle")


def test_states_that_cannot_be_pickled_count_as_different():
    with pytest.raises(CheckpointError, match="loader was saved by 3 ranks"):
        own_state({"loader": {KEY: [{"n": Unpicklable()} for _ in range(3)]}}, TwoRanks, "x")


def test_the_only_state_is_used_without_a_comparison():
    state = {"n": Unpicklable()}
    assert own_state({"loader": {KEY: [state, None, None]}}, TwoRanks, "x") == {"loader": state}


def test_a_state_of_the_first_rank_only_is_used_by_all():
    assert own_state({"loader": {KEY: [{"n": 1}, None]}}, TwoRanks, "x") == {"loader": {"n": 1}}
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        own_state({"loader": {KEY: [{"n": 1}, {"n": 2}, None]}}, TwoRanks, "x")


def partly(rank):
    torch.distributed.init_process_group("gloo")
    state = {"data": Position({"n": 1}), "x": 1} if rank == 0 else {}
    return own_state(state_to_save(state, Ranks(), sharded=True).tree, Ranks(), "x")


def test_a_state_that_only_the_first_rank_has_is_saved():
    assert run_ranks(partly) == [{"data": {"n": 1}, "x": 1}, {}]


class Trainer:
    """An object of the user with a module and an optimizer, as in torch's tutorial."""

    def __init__(self, get_state_dict=None):
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.get_state_dict = get_state_dict

    def state_dict(self):
        if self.get_state_dict is not None:
            return dict(zip(("model", "optimizer"), self.get_state_dict(self.model, self.optimizer), strict=True))
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 3}

    def load_state_dict(self, state):
        raise AssertionError("is never restored")


def test_the_weights_of_modules_and_optimizers_are_not_compared():
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        "model": model,
        "optimizer": optimizer,
        "inner": {"model": torch.compile(model), "states": [model.state_dict()]},
        "states": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "trainer": Trainer(),
        "app": Trainer(get_state_dict),
        "step": 3,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1),
    }
    assert set(take_state(state, sharded=True).compared) == {("trainer", "epoch"), ("step",), ("scheduler",)}


def unpicklable(rank):
    torch.distributed.init_process_group("gloo")
    value = {"n": (lambda: 1) if rank == 1 else 2}
    try:
        state_to_save({"data": Position(value)}, Ranks(), sharded=True)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_state_that_cannot_be_pickled_fails_on_all_ranks():
    first, second = run_ranks(unpicklable)
    assert "lambda" in first
    assert "lambda" in second


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_gathered_on_the_cpu():
    from torchobj.checkpoint.state.ranks import _pickled, _unpickled

    assert _unpickled(_pickled(torch.ones(2, device="cuda"))).device.type == "cpu"
