"""Saved names and their prefixes: what is renamed, what is refused, and which prefixes a mismatch needs."""

import collections
import copy

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from torchobj import exceptions
from torchobj.checkpoint.steps.prefixes import PrefixMap, wrapper_prefixes

WRAPPED = PrefixMap({"_orig_mod.": "", "module.": ""})


@pytest.mark.parametrize(
    ("prefixes", "name", "expected"),
    [
        ({"module.": ""}, "module.a", "a"),
        ({"module.": ""}, "modules.a", "modules.a"),
        ({"module.": "", "_orig_mod.": ""}, "_orig_mod.module._orig_mod.a", "a"),
        ({"_orig_mod.": ""}, "blocks.0._orig_mod.a", "blocks.0.a"),
        ({"a.": "b."}, "a.a.x", "b.a.x"),
        ({"a.": "b.", "b.": "a."}, "a.b.x", "b.b.x"),
        ({"module.": "", "module.inner.module.": "inner.module."}, "module.inner.module.x", "inner.module.x"),
        ({"": "module."}, "a", "module.a"),
        ({"": "module.", "_orig_mod.": ""}, "_orig_mod.a", "module.a"),
        ({"": ""}, "a.b", "a.b"),
        ({}, "", ""),
    ],
)
def test_a_prefix_is_replaced_at_the_start_and_removed_within(prefixes, name, expected):
    assert PrefixMap(prefixes).name(name, of_tensor=True) == expected


def test_the_state_of_a_wrapped_module_is_that_which_torch_makes_of_it():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = torch.nn.Sequential(collections.OrderedDict(module=module)).state_dict()
    expected = copy.copy(wrapped)
    expected._metadata = wrapped._metadata.copy()
    consume_prefix_in_state_dict_if_present(expected, "module.")
    found = WRAPPED.state({"model": wrapped}, "here")["model"]
    assert (list(found), found._metadata) == (list(expected), expected._metadata)
    again = PrefixMap({"": "module."}).state({"model": found}, "here")["model"]
    assert list(again) == list(wrapped)
    assert again._metadata["module.1"] == wrapped._metadata["module.1"]


def test_the_empty_prefix_is_that_of_parameters_only():
    model, number = {"a": torch.ones(1)}, {"step": torch.ones(()), "exp_avg": torch.ones(1)}
    named = {"state": {"a": number}, "param_groups": [{"params": ["a"], "betas": (0.9, 0.99)}]}
    numbered = {"state": {0: number}, "param_groups": [{"params": [0], "param_names": ["a"]}]}
    state = {"model": model, "x": torch.ones(1), "deep": {"n": 1, "x": torch.ones(1)}, "o": [named], "p": numbered}
    state |= {"named": named, "empty": {}, 3: 4}
    found = PrefixMap({"": "module."}).state(state, "here")
    assert list(found) == list(state)
    assert list(found["model"]) == ["module.a"]
    assert list(found["deep"]) == ["n", "x"]
    assert found["named"]["state"] == {"module.a": number}
    assert found["named"]["param_groups"] == [{"params": ["module.a"], "betas": (0.9, 0.99)}]
    assert found["p"]["state"] == {0: number}
    assert found["p"]["param_groups"] == [{"params": [0], "param_names": ["module.a"]}]
    assert found["o"] is state["o"]
    assert list(state["model"]) == ["a"]


def test_two_entries_of_one_new_name_are_an_error_that_names_them():
    for state in ({"model": {"a": 1, "module.a": 2}}, {"model": {"module.a": 1, "_orig_mod.a": 2}}):
        first, second = state["model"]
        with pytest.raises(
            exceptions.CheckpointError,
            match=rf"^here: prefix_map=\{{.*\}}: 'model.{first}' and 'model.{second}' get the name 'a'$",
        ):
            WRAPPED.state(state, "here")


def test_a_state_that_contains_itself_is_renamed_once():
    state = {"module.a": 1}
    state["deep"] = {"module.self": state}
    found = WRAPPED.state(state, "here")
    assert found["deep"]["self"] is found
    assert found["a"] == 1
    groups = []
    groups.append(groups)
    assert len(WRAPPED.state({"optimizer": {"param_groups": groups}}, "here")["optimizer"]["param_groups"]) == 1
    deep = {}
    for _ in range(5000):
        deep = {"module.a": deep}
    assert list(WRAPPED.state({"deep": deep}, "here")["deep"]) == ["a"]
    while deep:
        # Not by recursion.
        deep = deep.popitem()[1]


@pytest.mark.parametrize("wrong", [["module."], {"module.": None}, {1: ""}, "module."])
def test_prefixes_that_are_no_strings_are_refused(wrong):
    with pytest.raises(exceptions.ConfigError, match=r"prefix_map=.*must be a dict of strings"):
        PrefixMap(wrong)


def tensor_metadata():
    size = torch.Size([2])
    return TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0]), size)])


def of_paths(paths):
    described = {".".join(map(str, path)): kind for path, kind in paths.items()}
    names = dict(zip(described, paths, strict=True))
    return Metadata(described, names, {MetadataIndex(name, torch.Size([0])): name for name in described})


def test_metadata_is_renamed_everywhere():
    tensor, value = tensor_metadata(), BytesStorageMetadata()
    metadata = of_paths(
        {
            ("model", "module.a"): tensor,
            ("optimizer", "state", "module.a", "step"): tensor,
            ("optimizer", "param_groups", 0, "params"): value,
            ("n",): value,
        }
    )
    found = WRAPPED.metadata(metadata, "here")
    assert list(found.state_dict_metadata) == [
        "model.a",
        "optimizer.state.a.step",
        "optimizer.param_groups.0.params",
        "n",
    ]
    assert found.planner_data["optimizer.state.a.step"] == ("optimizer", "state", "a", "step")
    assert found.storage_data[MetadataIndex("model.a", torch.Size([0]))] == "model.module.a"
    back = PrefixMap({"": "module."}).metadata(found, "here")
    assert (back.state_dict_metadata, back.planner_data) == (metadata.state_dict_metadata, metadata.planner_data)
    assert PrefixMap(None).metadata(metadata, "here") is metadata


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([("m", "a"), ("m", "module.a")], "'m.a' and 'm.module.a' get the name 'a'"),
        ([("m",), ("m", "a")], "the place of m.a is not valid"),
        ([("m", "a"), ("m",)], "the place of m is not valid"),
        ([("m",) * 300], "is not valid"),
    ],
)
def test_metadata_whose_names_are_not_valid_is_refused(paths, text):
    metadata = of_paths(dict.fromkeys(paths, tensor_metadata()))
    with pytest.raises(exceptions.CheckpointError, match=f"^here: .*({text})"):
        WRAPPED.metadata(metadata, "here")


def test_names_that_collide_when_they_are_joined_are_refused():
    metadata = of_paths(dict.fromkeys([("m", "x", "module.a"), ("m", "_orig_mod.x.a")], tensor_metadata()))
    with pytest.raises(exceptions.CheckpointError, match=r"'m.x.module.a' and 'm._orig_mod.x.a' get the name 'm.x.a'"):
        WRAPPED.metadata(metadata, "here")


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("m.a", "m.module.a", {"module.": ""}),
        ("m.a", "m._orig_mod.module.a", {"_orig_mod.": "", "module.": ""}),
        ("m.blocks.0.a", "m.blocks.0._orig_mod.a", {"_orig_mod.": ""}),
        ("m.module.a", "m.a", {"": "module."}),
        ("m.module._orig_mod.a", "m.a", {"": "module._orig_mod."}),
        ("m.module.a", "m._orig_mod.a", {"_orig_mod.": "", "": "module."}),
        ("m.module._orig_mod.a", "m.module.a", {"module.": "", "": "module._orig_mod."}),
        ("m.blocks.0._orig_mod.a", "m.module.blocks.0._orig_mod.a", {"module.": ""}),
        ("m.blocks.0._orig_mod.a", "m.blocks.0.a", {}),
        ("m.a", "m.b", {}),
    ],
)
def test_the_prefixes_of_a_mismatch_are_exact(here, there, expected):
    found = wrapper_prefixes([here, "other"], [there, "another"])
    assert repr(found) == repr(expected)
    if expected:
        assert found.name(there[2:], of_tensor=True) == here[2:]
