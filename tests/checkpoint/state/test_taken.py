"""The state of a save: what ranks compare, and what the first one gets of the others."""

import pytest
import torch

from tests.support.ranks import run_ranks
from torchobj.checkpoint.state.rank_states import own_state
from torchobj.checkpoint.state.taken import state_to_save, take_state
from torchobj.ranks.meeting import Ranks, packed, unpacked


class Position(torch.utils.data.Dataset):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def saved(state):
    """What this rank saves of a state."""
    ranks = Ranks()
    found = state_to_save(state, ranks, sharded=True)
    with ranks.meeting() as meeting:
        sent = meeting.gather(packed(found.values))
    return found.tree if sent is None else found.with_values(found.tree, list(map(unpacked, sent)))


def partly(rank):
    torch.distributed.init_process_group("gloo")
    state = {"data": Position({"n": 1}), "x": 1} if rank == 0 else {}
    return own_state(saved(state), Ranks(), "x")


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
        saved({"data": Position(value)})
    except Exception as error:
        return str(error)
    return "no error"


def test_a_state_that_cannot_be_pickled_fails_on_all_ranks():
    first, second = run_ranks(unpicklable)
    assert "lambda" in first
    assert "lambda" in second


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_gathered_on_the_cpu():
    assert unpacked(packed(torch.ones(2, device="cuda"))).device.type == "cpu"
