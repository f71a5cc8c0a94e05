"""A snapshot is what torch would have saved and loaded, in once the memory; a watch sees what changes."""

import collections
import io

import pytest
import torch

from torchobj import exceptions
from torchobj.checkpoint.snapshot import _ROOM_BYTES, Snapshots, Watch, state_of

LARGE = _ROOM_BYTES // 4 + 5


class Own(torch.Tensor):
    """A subclass."""


def reloaded(state):
    out = io.BytesIO()
    torch.save(state, out)
    out.seek(0)
    return torch.load(out, weights_only=False)


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
def test_a_snapshot_is_what_torch_would_have_saved_and_loaded(name):
    value = dict(zoo())[name]
    state = {"value": value, "again": value}
    taken = Snapshots().take(state)
    assert same(taken["value"], reloaded(state)["value"])
    assert taken["value"] is taken["again"]
    assert getattr(taken["value"], "note", None) == getattr(value, "note", None)


def test_a_storage_is_copied_once_however_many_tensors_share_it():
    shared = torch.rand(LARGE)
    tied = torch.nn.Parameter(shared)
    state = {"tied": [tied, tied], "view": shared[5:], "data": shared.detach()}
    snapshots = Snapshots()
    taken = snapshots.take(state)
    assert taken["tied"][0] is taken["tied"][1]
    places = {tensor.untyped_storage().data_ptr() for tensor in (taken["tied"][0], taken["view"], taken["data"])}
    assert len(places) == 1
    assert places != {shared.data_ptr()}
    assert sum(room.nbytes for room in snapshots._rooms) == shared.nbytes


def test_a_snapshot_of_another_state_keeps_no_memory_of_the_last():
    snapshots = Snapshots()
    snapshots.take([torch.rand(LARGE), torch.rand(2 * LARGE)])
    kept = {room.data_ptr() for room in snapshots._rooms if room.nbytes == 4 * LARGE}
    snapshots.take([torch.rand(3 * LARGE), torch.rand(LARGE)])
    assert sorted(room.nbytes for room in snapshots._rooms) == [4 * LARGE, 12 * LARGE]
    assert kept < {room.data_ptr() for room in snapshots._rooms}


def test_memory_of_a_snapshot_in_inference_mode_is_used_again_outside_it():
    snapshots, state = Snapshots(), {"large": torch.rand(_ROOM_BYTES), "small": torch.rand(3)}
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            snapshot = snapshots.take(state)
        assert not any(tensor.is_inference() for tensor in snapshot.values())
        assert all(torch.equal(snapshot[name], state[name]) for name in state)


def test_a_watch_sees_every_tensor_wherever_it_stands():
    inner = torch.ones(3)
    state = {"a": {"b": [torch.ones(2), (torch.ones(1),)]}, "set": {1: inner}, "model": torch.nn.Linear(2, 2)}
    state = state_of(state)
    watch = Watch(state)
    watch.check()
    assert watch.state["set"][1].data_ptr() == inner.data_ptr()
    for tensor, name in [
        (state["a"]["b"][0], r"a\.b\[0\]"),
        (state["a"]["b"][1][0], r"a\.b\[1\]\[0\]"),
        (inner, r"set\.1"),
        (state["model"]["weight"], r"model\.weight"),
    ]:
        watch = Watch(state)
        tensor.mul_(2)
        with pytest.raises(exceptions.CheckpointError, match=f"{name} was changed while it was saved"):
            watch.check()


def test_a_watch_sees_an_optimizer_step():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.rand(1, 2)).sum().backward()
        watch = Watch(state_of({"model": model}))
        optimizer.step()
        with pytest.raises(exceptions.CheckpointError, match="model.weight"):
            watch.check()
        watch = Watch(state_of({"optimizer": optimizer}))
        optimizer.step()
        with pytest.raises(exceptions.CheckpointError, match=r"optimizer\.state\.0\."):
            watch.check()
