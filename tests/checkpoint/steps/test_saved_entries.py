"""Entries of a distributed checkpoint that are read without a template: their structure, and metadata that is hostile."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchobj import exceptions
from torchobj.checkpoint.state.rank_states import FIRSTS, PARTS
from torchobj.checkpoint.steps.saved_entries import SavedEntries, adopts
from torchobj.ranks.meeting import Ranks

VALUE = BytesStorageMetadata()


def tensor(*size):
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), [])


def whole(entries, planner_data="of the entries"):
    described = {".".join(map(str, path)): kind for path, kind in entries.items()}
    paths = dict(zip(described, entries, strict=True)) if planner_data == "of the entries" else planner_data
    return SavedEntries(Metadata(described, paths), "here").whole(Ranks())


def test_a_state_gets_the_containers_that_were_saved():
    found = whole({("m", "a.b"): tensor(2, 3), ("l", 0, "x"): VALUE, ("l", 2, 0): VALUE, ("n",): VALUE})
    assert found["m"]["a.b"].shape == (2, 3)
    assert found["m"]["a.b"].device.type == "cpu"
    assert found["l"] == [{"x": None}, None, [None]]
    assert found["n"] is None
    assert whole({}) == {}


def test_of_parts_only_that_of_this_rank_is_read():
    parts = {("m", PARTS, "0", "a"): tensor(1), ("m", PARTS, "1", "b"): tensor(1), ("n",): VALUE}
    assert whole(parts | {("m", PARTS, FIRSTS, "0"): VALUE}).keys() == {"m", "n"}
    assert whole(parts | {("m", PARTS, FIRSTS, "0"): VALUE})["m"][PARTS].keys() == {"0"}
    assert whole(parts | {("m", PARTS, FIRSTS, ""): VALUE}).keys() == {"n"}
    assert whole(parts | {("m", PARTS, FIRSTS, "7"): VALUE}).keys() == {"n"}
    with pytest.raises(
        exceptions.CheckpointError, match="^here: m was saved by 2 ranks, each its own, and there are 1"
    ):
        whole(parts | {("m", PARTS, FIRSTS, "0,1"): VALUE})


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({("l", 10**12): VALUE}, "a list has 1000000000001 elements"),
        ({("x",): tensor(1 << 58)}, "its tensors do not fit into memory"),
        ({("x",): VALUE, ("x", "y"): VALUE}, "the place of x.y is not valid"),
        ({("x",) * 300: VALUE}, "is not valid"),
    ],
)
def test_structures_and_sizes_that_cannot_be_are_refused(entries, text):
    with pytest.raises(exceptions.CheckpointError, match=f"^here: .*{text}"):
        whole(entries)


@pytest.mark.parametrize("planner_data", [None, [], "x", {"m.a": ["m", "a"]}, {"m.a": ()}, {"m.a": ("m", b"a")}])
def test_paths_that_are_none_are_those_of_the_names(planner_data):
    assert whole({("m", "a"): VALUE}, planner_data) == {"m": {"a": None}}


def test_empty_dicts_adopt_but_those_of_an_optimizer_and_objects():
    assert adopts({}, {})
    assert not adopts({}, {"a": 1})
    assert not adopts({}, [])
    assert not adopts({"state": {}, "param_groups": []}, {})
    assert not adopts({}, torch.nn.Linear(1, 1))
