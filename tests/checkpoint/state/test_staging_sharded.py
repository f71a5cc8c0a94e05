"""Staged copies of state shards: everything is copied, and the given state is unchanged."""

import collections
from collections.abc import MutableMapping
from typing import NamedTuple

import pytest
import torch

from torchobj.checkpoint.state.staging import _BLOCK_BYTES, Stager
from torchobj.exceptions import CheckpointError


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict


class Sharing(MutableMapping):
    """A mapping whose `copy.copy` has the same entries."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


@pytest.mark.parametrize("kind", [dict, Sharing, collections.ChainMap, collections.UserDict, collections.OrderedDict])
def test_a_copy_does_not_change_the_state(kind):
    tensor = torch.ones(3)
    inner = kind({"tensor": tensor, "list": [tensor, 1]})
    copy = Stager().stage_shard({"inner": inner})["inner"]
    tensor.add_(1)
    assert inner["tensor"] is tensor
    assert inner["list"][0] is tensor
    assert copy["tensor"].tolist() == copy["list"][0].tolist() == [1, 1, 1]
    assert copy["list"][1] == 1


def test_containers_keep_their_types():
    counts = collections.Counter("aab")
    state = {"counts": counts, "size": torch.Size([1, 2]), "pair": Pair(torch.ones(1), {"x": 1}), "deep": ([{1}],)}
    copy = Stager().stage_shard(state)
    assert copy == {**state, "pair": copy["pair"]}
    assert [type(copy[name]) for name in state] == [type(value) for value in state.values()]
    assert copy["pair"].second == {"x": 1}
    counts["c"] = 1
    state["deep"][0][0].add(2)
    assert copy["counts"] == collections.Counter("aab")
    assert copy["deep"] == ([{1}],)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_tied_tensors_are_copied_once_and_views_with_their_dtype():
    base = torch.arange(_BLOCK_BYTES, dtype=torch.uint8)
    state = {
        "a": base,
        "again": base.view(base.shape),
        "half": base[: _BLOCK_BYTES // 2],
        "turned": base.view(4, -1).t(),
    }
    state |= {"other": base.view(torch.int32), "none": torch.empty(0, 3), "nothing": torch.empty(2, 0)}
    state |= {"quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "wide": base[:1].expand(5)}
    copy = Stager().stage_shard(state)
    assert copy["a"].data_ptr() == copy["again"].data_ptr() != base.data_ptr()
    for name, tensor in state.items():
        assert torch.equal(copy[name], tensor), name
        assert (copy[name].shape, copy[name].dtype) == (tensor.shape, tensor.dtype)
    assert copy["half"].untyped_storage().nbytes() == _BLOCK_BYTES // 2


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_other_tensors_are_copied_too_and_freed_ones_raise():
    nested, sparse = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.eye(3).to_sparse()
    copy = Stager().stage_shard({"nested": nested, "sparse": sparse})
    nested.mul_(2)
    sparse.values().mul_(2)
    assert [part.tolist() for part in copy["nested"].unbind()] == [[1, 1], [1, 1, 1]]
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="a tensor of 20 bytes has no memory"):
        Stager().stage_shard({"freed": freed})
