"""Files of safetensors are byte for byte those of `safetensors.torch`, and what it refuses is refused."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.saved_objects import MIB, random_tensor, whole
from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.safetensors.header import DTYPES
from torchobj.checkpoint.safetensors.save import checked, plan_of
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError

safetensors = pytest.importorskip("safetensors.torch")

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=4), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES)
)


def planned(tensors, metadata=None):
    return whole(plan_of(checked(tensors), metadata))


@settings(max_examples=120)
@given(TENSORS, st.none() | st.dictionaries(st.text('aé"\\\n\x7f\u2028😀'), st.text("b\t/"), max_size=1))
def test_the_bytes_are_those_of_safetensors(described, metadata):
    tensors = {
        name: random_tensor(DTYPES[dtype], shape, seed=len(name))
        for name, (dtype, shape) in described.items()
        if dtype != "F4" or shape
    }
    # safetensors 0.8 writes invalid JSON for neither.
    if tensors or metadata != {}:
        assert planned(tensors, metadata) == safetensors.save(tensors, metadata)


def test_each_dtype_is_written_as_by_safetensors():
    for name, dtype in DTYPES.items():
        for shape in ((2, 4), (0, 2), (4,)) if name == "F4" else ((2, 4), (0,), ()):
            tensors = {"x": random_tensor(dtype, shape)}
            assert planned(tensors) == safetensors.save(tensors), name


def test_several_members_of_the_metadata_keep_their_order():
    """That of safetensors' own differs from call to call."""
    data = planned({"x": torch.ones(1)}, {"b": "1", "a": "2", "c": "3"})
    assert b'{"__metadata__":{"b":"1","a":"2","c":"3"},"x":' in data
    assert safetensors.load(data)["x"].item() == 1


def test_parts_of_one_storage_without_common_bytes_are_saved_alone():
    base = torch.arange(24.0).reshape(6, 4)
    tensors = {"a": base[4:], "b": base[:2], "empty": base[3:3], "parameter": torch.nn.Parameter(torch.ones(2))}
    data = planned(tensors)
    assert data == safetensors.save(tensors)
    assert torch.equal(safetensors.load(data)["a"], base[4:])


BASE = torch.ones(4, 4)
REFUSED = {
    "the same tensor": ({"a": BASE, "b": BASE}, CheckpointError, "some tensors share memory: a and b"),
    "a part": ({"whole": BASE, "part": BASE[1:3]}, CheckpointError, "share memory: whole and part"),
    "overlapping parts": ({"a": BASE[:3], "b": BASE[2:]}, CheckpointError, "share memory"),
    "not contiguous": ({"a": torch.ones(2, 3).t()}, ConfigError, "a: a non contiguous tensor"),
    "expanded": ({"a": torch.ones(1).expand(3)}, ConfigError, "a: a non contiguous tensor"),
    "sparse": ({"a": torch.ones(2).to_sparse()}, ConfigError, "a: a sparse tensor"),
    "no tensor": ({"a": 3}, ConfigError, "a: expected a tensor, but got 3"),
    "nested": ({"model": {"a": torch.ones(2)}}, ConfigError, "model: expected a tensor"),
    "no dict": ([torch.ones(2)], ConfigError, "expected a dict of tensors by name.*but got a list"),
}


@pytest.mark.parametrize(("tensors", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_safetensors_refuses_is_refused_with_an_error_of_the_same_base(tensors, error, message):
    with pytest.raises(error, match=message):
        checked(tensors)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        safetensors.save(tensors)
    assert isinstance(theirs.value, RuntimeError) == issubclass(error, RuntimeError)


class Wrapper(torch.Tensor):
    """A tensor of other tensors, as DTensor is."""

    __tensor_flatten__ = __tensor_unflatten__ = None


def test_what_has_no_bytes_or_other_ones_is_refused():
    """safetensors writes the memory of a conjugated tensor as it is."""
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    with pytest.raises(ConfigError, match="a view that conjugates or negates"):
        checked({"a": conjugated})
    with pytest.raises(ConfigError, match="a: a Wrapper: save the tensor that it wraps"):
        checked({"a": torch.ones(2).as_subclass(Wrapper)})
    with pytest.raises(ConfigError, match="a: a tensor on meta has no bytes"):
        checked({"a": torch.ones(2, device="meta")})
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="a of 32 bytes has no memory"):
        checked({"a": freed})


def test_a_plan_sends_tensors_from_their_own_memory():
    base = torch.zeros(6, 4)
    plan = plan_of({"a": base[2:4], "b": torch.zeros(5)}, None)
    base[2] = 7
    assert safetensors.load(whole(plan))["a"][0].tolist() == [7] * 4
    assert plan.holes[0].storage.data_ptr() == base[2:].data_ptr()


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_large_file_is_uploaded_in_parts_of_the_same_bytes(bucket, config):
    tensors = {
        "large": random_tensor(torch.bfloat16, (6 * MIB,)),
        "other": random_tensor(torch.float32, (2 * MIB,), seed=1),
        "step": torch.tensor(3),
    }
    seen = []
    saved = torchobj.save(
        tensors, f"{bucket.url}/m.safetensors", metadata={"a": "b"}, config=config, progress=seen.append
    )
    expected = safetensors.save(tensors, {"a": "b"})
    assert bucket.body("m.safetensors") == expected
    assert (saved.url, saved.size) == (f"{bucket.url}/m.safetensors", len(expected))
    assert seen[-1].bytes_done == seen[-1].bytes_total == len(expected)


def test_conditions_hold(bucket):
    url, tensors = f"{bucket.url}/m.safetensors", {"a": torch.ones(2)}
    saved = torchobj.save(tensors, url, overwrite=False, config=bucket.config)
    with pytest.raises(PreconditionFailedError):
        torchobj.save(tensors, url, overwrite=False, config=bucket.config)
    torchobj.save({"a": torch.zeros(2)}, url, if_version=saved.version, config=bucket.config)
    with pytest.raises(PreconditionFailedError):
        torchobj.save(tensors, url, if_version=saved.version, config=bucket.config)
    assert not torchobj.load(url, config=bucket.config)["a"].any()


def test_tensors_of_devices_are_sent_through_blocks(bucket, monkeypatch):
    """The CPU is treated as a device whose memory is not accessible."""
    monkeypatch.setattr(device_memory, "is_reachable", lambda device: False)
    monkeypatch.setattr("torchobj.checkpoint.archive.save.is_reachable", lambda device: False)
    base = random_tensor(torch.uint8, (4, 5 * MIB))
    tensors = {"part": base[1:3], "other": base[3], "small": torch.ones(3)}
    torchobj.save(tensors, f"{bucket.url}/m.safetensors", config=bucket.config)
    assert bucket.body("m.safetensors") == safetensors.save(tensors)
    loaded = torchobj.load(f"{bucket.url}/m.safetensors", config=bucket.config)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_format_can_be_an_argument_and_a_file_of_torch_has_no_metadata():
    torchobj.save({"a": torch.ones(2)}, "memory://formats/weights", format="safetensors")
    assert bytes(torchobj.get("memory://formats/weights")) == safetensors.save({"a": torch.ones(2)})
    for options in ({"metadata": {}}, {"max_shard_bytes": 5}):
        with pytest.raises(ConfigError, match="only for format='safetensors'"):
            torchobj.save({"a": torch.ones(2)}, "memory://formats/weights.pt", **options)
    with pytest.raises(ConfigError, match="format='pt'"):
        torchobj.save({"a": torch.ones(2)}, "memory://formats/weights.pt", format="pt")
    assert torch.load(io.BytesIO(torch_file()), weights_only=True)["a"].tolist() == [1, 1]


def torch_file():
    torchobj.save({"a": torch.ones(2)}, "memory://formats/weights.pt")
    return bytes(torchobj.get("memory://formats/weights.pt"))
