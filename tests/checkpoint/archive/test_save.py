"""Files of `torchobj.save` and `torch.save` load with `torchobj.load` and `torch.load`, in few requests."""

import collections
import io
import random
import warnings
import zipfile
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.saved_objects import MIB, QUIET, all_ways, load, planning, random_tensor, same, save
from torchobj import exceptions
from torchobj.store.transfers import ByteProgress

pytestmark = [QUIET, pytest.mark.usefixtures("planned"), pytest.mark.providers("s3", GCS_IN_MATRIX)]


QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def can_be_saved(dtype):
    """False for `int1` and similar dtypes, which torch itself cannot save."""
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except KeyError:
        return False
    return True


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str)


with warnings.catch_warnings(action="ignore"):
    SAVED = [dtype for dtype in DTYPES if can_be_saved(dtype)]


@pytest.mark.parametrize("dtype", SAVED, ids=str)
def test_every_dtype_and_shape_round_trips(bucket, dtype):
    matrix = random_tensor(dtype, (4, 6))
    value = {
        "matrix": matrix,
        "number": random_tensor(dtype, ()),
        "empty": random_tensor(dtype, (0, 3)),
        "transposed": random_tensor(dtype, (5, 2)).t(),
        "strided": random_tensor(dtype, (9,))[1::3],
        "rows": matrix[1:3],
    }
    for loaded in all_ways(bucket, value):
        assert same(value, loaded)
        assert loaded["rows"].untyped_storage().data_ptr() == loaded["matrix"].untyped_storage().data_ptr()


def test_all_dtypes_that_torch_can_save_are_tested():
    missing = {str(dtype).removeprefix("torch.") for dtype in set(DTYPES) - set(SAVED)}
    assert missing <= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert {torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.uint16, torch.bool} <= set(SAVED)


@pytest.mark.providers("s3", "gs")
def test_quantized_sparse_and_conjugate_tensors_round_trip(bucket):
    value = {
        "affine": torch.quantize_per_tensor(torch.rand(6), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.quint8
        ),
        "coo": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "buffer": torch.nn.Buffer(torch.rand(3)),
        "gradless": torch.nn.Parameter(torch.rand(3), requires_grad=False),
    }
    for loaded in all_ways(bucket, value, weights_only=False):
        assert same(value, loaded)
        assert loaded["channels"].q_per_channel_scales().tolist() == value["channels"].q_per_channel_scales().tolist()
        assert torch.equal(loaded["affine"].dequantize(), value["affine"].dequantize())


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
@pytest.mark.parametrize("columns", [4, 5])
def test_quantized_elements_that_share_a_byte_round_trip(bucket, dtype, columns):
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 1.0, 2.0])
    value = {"packed": torch.quantize_per_channel(torch.rand(3, columns), scales, zeros, 0, dtype)}
    for loaded in all_ways(bucket, value, weights_only=False):
        assert loaded["packed"].dtype is dtype
        assert loaded["packed"].shape == (3, columns)
        assert bytes(loaded["packed"].untyped_storage()) == bytes(value["packed"].untyped_storage())


def test_shared_memory_is_saved_once_and_shared_after_load(bucket):
    base = torch.rand(1000)
    weight = torch.nn.Parameter(torch.rand(20, 20))
    value = {"base": base, "part": base[10:20], "encoder": weight, "decoder": weight}
    for loaded in all_ways(bucket, value):
        assert loaded["encoder"] is loaded["decoder"]
        loaded["base"][10] = 7.0
        assert loaded["part"][0] == 7.0
    assert len(bucket.body("ours.pt")) < 4 * (1000 + 400) + 4096


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("seen", torch.tensor(3))


def test_modules_optimizers_and_objects_that_access_tensors_round_trip(bucket):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net.layer(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(7)
    value = {"net": net, "optimizer": optimizer.state_dict(), "generator": generator, "random": random.getstate()}
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    for loaded in all_ways(bucket, value, weights_only=False):
        assert same(dict(net.state_dict()), dict(loaded["net"].state_dict()))
        assert same(value["optimizer"], loaded["optimizer"])
        assert torch.equal(torch.rand(3, generator=loaded["generator"]), expected)
        assert loaded["random"] == value["random"]


def test_a_save_within_skip_data_is_complete(bucket):
    value = {"a": torch.rand(10), "b": torch.rand(300)}
    for copied_bytes in (0, MIB):
        with mock.patch.object(planning, "_COPIED_BYTES", copied_bytes), torch.serialization.skip_data():
            save(bucket, value)
        assert same(value, load(bucket))


@pytest.mark.providers("s3")
@pytest.mark.parametrize("count", often(1, [2_000, 10_000]))
def test_many_tensors_round_trip(bucket, count):
    value = {f"layer.{number}": torch.full((number % 7,), number) for number in range(count)}
    result = save(bucket, value)
    assert zipfile.ZipFile(io.BytesIO(bucket.body("ckpt.pt"))).testzip() is None
    assert result == (f"{bucket.url}/ckpt.pt", len(bucket.body("ckpt.pt")), result.version)
    assert same(value, load(bucket))
    # The directory and the pickle are larger than the prefix and the suffix that are fetched first.
    assert same({"layer.77": value["layer.77"]}, load(bucket, keys=["layer.77"]))


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.builds(
        random_tensor, st.sampled_from(SAVED), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 99)
    )
)


objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(objects, st.booleans(), st.booleans())
def test_any_object_round_trips(value, checksum, weights_only):
    result = torchobj.save(value, "memory://properties/any.pt", checksum=checksum)
    body = torchobj.Store("memory://properties").get("any.pt")
    assert result.size == len(body)
    assert same(value, torchobj.load("memory://properties/any.pt", weights_only=weights_only))
    assert same(value, torch.load(io.BytesIO(body), weights_only=weights_only))


def test_checkpoints_round_trip_on_every_server(any_bucket):
    value = {"w": random_tensor(torch.float32, (9 * MIB,)), "b": torch.rand(7), "n": 3}
    result = save(any_bucket, value, "step 1/é.pt")
    assert result.size == len(any_bucket.body("step 1/é.pt"))
    assert same(value, torch.load(io.BytesIO(any_bucket.body("step 1/é.pt"))))
    assert same(value, load(any_bucket, "step 1/é.pt"))
    assert any_bucket.uploads() == []


@pytest.mark.providers("s3", "gs")
def test_a_small_checkpoint_takes_two_requests_and_a_large_one_few_more(bucket, control):
    for count, most in ((100_000, 3), (12 * MIB, 16)):
        save(bucket, {"w": torch.rand(count), "b": torch.rand(3)})
        control.clear_requests()
        load(bucket)
        requests = control.requests()
        assert {request.operation for request in requests} == {"GetObject"}
        assert len(requests) <= most


def freed(nbytes=0, dtype=torch.float32, size=300_000):
    tensor = torch.ones(size, dtype=dtype)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        freed(),
        {"small": freed(size=4), "large": torch.ones(300_000)},
        [torch.nn.Parameter(freed())],
        freed(nbytes=100),
        freed(dtype=torch.bool),
        torch.nn.ParameterList([torch.nn.Parameter(freed(size=3))]),
    ],
    ids=["alone", "small", "parameter", "partly", "bool", "module"],
)
def test_a_tensor_whose_memory_was_freed_is_refused(bucket, value):
    with pytest.raises(exceptions.CheckpointError, match="has no memory: its storage has"):
        save(bucket, value)
    assert bucket.keys() == []


def test_tensors_that_need_no_memory_are_saved(bucket):
    empty = torch.ones(3, 0)
    empty.untyped_storage().resize_(0)
    value = {"empty": empty, "expanded": torch.ones(1).expand(1000), "meta": torch.empty(5, device="meta")}
    save(bucket, {name: value[name] for name in ("empty", "expanded")})
    assert same(load(bucket)["expanded"], value["expanded"])
    save(bucket, value["meta"])


@pytest.mark.parametrize("name", ["model.safetensors", "model.SafeTensors"])
def test_what_only_a_file_of_torch_can_contain_is_not_written_under_the_name_of_safetensors(bucket, name):
    with pytest.raises(
        exceptions.ConfigError, match=r"step: expected a tensor, but got 1; only \.pt files have others"
    ):
        torchobj.save({"x": torch.ones(2), "step": 1}, f"{bucket.url}/{name}", config=bucket.config)
    assert bucket.keys() == []


def test_bytes_are_counted_for_progress_only(bucket, monkeypatch):
    counted = []
    monkeypatch.setattr(ByteProgress, "add", lambda _, size: counted.append(size))
    for name in ("a.pt", "a.safetensors"):
        torchobj.save({"a": torch.ones(3)}, f"{bucket.url}/{name}", config=bucket.config)
    assert counted == []
