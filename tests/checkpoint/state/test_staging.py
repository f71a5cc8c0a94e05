"""A staged copy equals what torch would have saved and loaded, in the same memory; a watch detects changes."""

import collections
import io

import pytest
import torch

from tests.support.saved_objects import whole
from torchobj import exceptions
from torchobj.checkpoint.state.staging import _BLOCK_BYTES, Stager, Watch, planned
from torchobj.checkpoint.state.taken import take_state

LARGE = _BLOCK_BYTES // 4 + 5


class Own(torch.Tensor):
    """A subclass."""


def reloaded(state):
    out = io.BytesIO()
    torch.save(state, out)
    out.seek(0)
    return torch.load(out, weights_only=False)


def loaded(plan):
    return torch.load(io.BytesIO(whole(plan)), weights_only=False)


def zoo():
    base = torch.arange(float(LARGE))
    hooked = torch.ones(3, requires_grad=True)
    named = torch.ones(2)
    named.note = "mine"
    yield "views", [base[:7], base[3::2], base]
    yield "transposed", torch.rand(3, 4).t()
    yield "expanded", torch.rand(1, 4).expand(3, 4)
    yield "0-dim", torch.tensor(3)
    yield "empty", torch.zeros(0, 3)
    yield "parameter", torch.nn.Parameter(torch.rand(3), requires_grad=False)
    yield "leaf", hooked
    yield "not a leaf", hooked * 2
    yield "named", named
    yield "subclass", torch.rand(3).as_subclass(Own)
    yield "conj", torch.rand(3, dtype=torch.complex64).conj()
    yield "neg", torch.rand(3, dtype=torch.complex64).conj().imag
    yield "sparse", torch.eye(3).to_sparse()
    yield "meta", torch.empty(3, device="meta")
    yield "ordered", collections.OrderedDict(a=torch.rand(2), b=(1, "x", None))
    names = ["float16", "bfloat16", "float64", "int8", "uint16", "uint64", "bool", "complex128", "float8_e5m2"]
    for name in names:
        yield name, torch.rand(5).to(getattr(torch, name))


def same(one, other):
    if isinstance(one, torch.Tensor):
        if one.device.type == "meta":
            return other.device.type == "meta" and one.shape == other.shape
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        elif one.stride() != other.stride() or one.storage_offset() != other.storage_offset():
            return False
        bits = [tensor.detach().contiguous().reshape(-1).resolve_conj().resolve_neg() for tensor in (one, other)]
        equal = bits[0].view(torch.uint8).tolist() == bits[1].view(torch.uint8).tolist()
        return equal and type(one) is type(other) and one.requires_grad == other.requires_grad
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", [name for name, _ in zoo()])
def test_a_staged_copy_is_what_torch_would_have_saved_and_loaded(name):
    value = dict(zoo())[name]
    state = {"value": value, "again": value}
    plan = Stager().stage(state)
    taken = loaded(plan)
    assert same(taken["value"], reloaded(state)["value"])
    assert taken["value"] is taken["again"]
    assert getattr(taken["value"], "note", None) == getattr(value, "note", None)


def test_a_storage_shared_by_tensors_is_copied_once():
    shared = torch.rand(LARGE)
    tied = torch.nn.Parameter(shared)
    state = {"tied": [tied, tied], "view": shared[5:], "data": shared.detach()}
    stager = Stager()
    plan = stager.stage(state)
    taken = loaded(plan)
    assert taken["tied"][0] is taken["tied"][1]
    places = {tensor.untyped_storage().data_ptr() for tensor in (taken["tied"][0], taken["view"], taken["data"])}
    assert len(places) == 1
    assert [hole.storage.data_ptr() for hole in plan.holes] == [block.data_ptr() for block in stager._blocks]
    assert shared.data_ptr() not in {block.data_ptr() for block in stager._blocks}
    assert sum(block.nbytes for block in stager._blocks) == shared.nbytes


def test_a_staged_copy_of_another_state_frees_the_memory_of_the_previous_one():
    stager = Stager()
    stager.stage([torch.rand(LARGE), torch.rand(2 * LARGE)])
    kept = {block.data_ptr() for block in stager._blocks if block.nbytes == 4 * LARGE}
    stager.stage([torch.rand(3 * LARGE), torch.rand(LARGE)])
    assert sorted(block.nbytes for block in stager._blocks) == [4 * LARGE, 12 * LARGE]
    assert kept < {block.data_ptr() for block in stager._blocks}


def test_memory_of_a_staged_copy_in_inference_mode_is_reused_outside_of_it():
    stager, state = Stager(), {"large": torch.rand(_BLOCK_BYTES), "small": torch.rand(3)}
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            plan = stager.stage(state)
        assert not any(block.is_inference() for block in stager._blocks)
        copy = loaded(plan)
        assert all(torch.equal(copy[name], state[name]) for name in state)


def watch_of(state):
    taken = take_state(state, sharded=False)
    return Watch(planned(taken.tree).tensors, taken.tensors)


def test_a_watch_detects_changes_of_every_tensor_in_the_state():
    inner = torch.ones(LARGE)
    model = torch.nn.Linear(2, 2)
    state = {"a": {"b": [torch.ones(2), (torch.ones(1),)]}, "set": {1: inner}, "model": model}
    watch_of(state).check()
    assert inner.data_ptr() in {hole.storage.data_ptr() for hole in planned(state).holes}
    for tensor, name in [
        (state["a"]["b"][0], r"a\.b\.0"),
        (state["a"]["b"][1][0], r"a\.b\.1\.0"),
        (inner, r"set\.1"),
        (model.state_dict()["weight"], r"model\.weight"),
    ]:
        watch = watch_of(state)
        tensor.mul_(2)
        with pytest.raises(exceptions.CheckpointError, match=f"{name} was changed while it was saved"):
            watch.check()


def test_a_watch_detects_an_optimizer_step():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.rand(1, 2)).sum().backward()
        watch = watch_of({"model": model})
        optimizer.step()
        with pytest.raises(exceptions.CheckpointError, match="model.weight"):
            watch.check()
        watch = watch_of({"optimizer": optimizer})
        optimizer.step()
        with pytest.raises(exceptions.CheckpointError, match=r"optimizer\.state\.0\."):
            watch.check()
