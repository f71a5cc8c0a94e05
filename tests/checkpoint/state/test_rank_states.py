"""Which of the states of several ranks a rank restores."""

import pickle

import pytest

from torchobj.checkpoint.state.rank_states import own_state
from torchobj.exceptions import CheckpointError

KEY = "torchobj_states_of_ranks"


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
