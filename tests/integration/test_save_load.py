"""What `torchobj.save` and `torch.save` save, `torchobj.load` and `torch.load` load: the same, whole, or a clear error."""

import collections
import importlib
import io
import json
import logging
import math
import random
import warnings
import zipfile
from typing import NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.settings import with_profile
from torchobj import exceptions
from torchobj.checkpoint import staging

planning = importlib.import_module("torchobj.checkpoint.save")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*quantize.*are deprecated",
    "ignore:Validating sparse tensor",
    "ignore:.*Sparse.*beta",
    "ignore:TypedStorage",
    "ignore:.*experimental and many operators",
)

MIB = 1 << 20

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def can_be_saved(dtype):
    """Not so of `int1` and its kin: torch itself cannot."""
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except KeyError:
        return False
    return True


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str)
with warnings.catch_warnings(action="ignore"):
    SAVED = [dtype for dtype in DTYPES if can_be_saved(dtype)]


def random_tensor(dtype, shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor):
    """A tensor's elements as bytes: NaNs are what they are."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def same(left, right):
    """Whether two objects are equal, types and dtypes and strides and all."""
    if isinstance(left, torch.Tensor):
        assert type(left) is type(right)
        assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
        assert left.requires_grad == right.requires_grad
        if left.layout is torch.sparse_coo:
            return same(left._indices(), right._indices()) and same(left._values(), right._values())
        if left.layout is torch.sparse_csr:
            return all(
                same(getattr(left, part)(), getattr(right, part)())
                for part in ("crow_indices", "col_indices", "values")
            )
        assert left.stride() == right.stride()
        assert raw(left) == raw(right)
        return True
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        return all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        return all(same(*both) for both in zip(left, right, strict=True))
    assert left == right or (left != left and right != right)
    return True


def put_stock(place, key, value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    place.boto.put_object(Bucket=place.bucket, Key=key, Body=out.getvalue())
    return out.getvalue()


@pytest.fixture(autouse=True, scope="module")
def planned():
    """The states of these tests are small; they are to be saved as large ones are."""
    with mock.patch.object(planning, "_COPIED_BYTES", 0):
        yield


def save(place, value, key="ckpt.pt", **options):
    return torchobj.save(value, f"{place.url}/{key}", config=place.config, **options)


def load(place, key="ckpt.pt", **options):
    return torchobj.load(f"{place.url}/{key}", config=place.config, **options)


def all_ways(place, value, **options):
    """The value after ours to stock, stock to ours and ours to ours, and ours again where torch copies what is small."""
    save(place, value, "ours.pt")
    with mock.patch.object(planning, "_COPIED_BYTES", MIB):
        save(place, value, "copied.pt")
    body = place.body("ours.pt")
    assert zipfile.ZipFile(io.BytesIO(body)).testzip() is None
    stock = put_stock(place, "stock.pt", value)
    assert len(stock) == len(body)
    yield torch.load(io.BytesIO(body), **options)
    yield load(place, "stock.pt", **options)
    yield load(place, "ours.pt", **options)
    copied = place.body("copied.pt")
    assert zipfile.ZipFile(io.BytesIO(copied)).testzip() is None
    assert len(stock) == len(copied)
    yield load(place, "copied.pt", **options)


@pytest.mark.parametrize("dtype", SAVED, ids=str)
def test_every_dtype_comes_back_in_every_shape(place, dtype):
    matrix = random_tensor(dtype, (4, 6))
    value = {
        "matrix": matrix,
        "number": random_tensor(dtype, ()),
        "empty": random_tensor(dtype, (0, 3)),
        "transposed": random_tensor(dtype, (5, 2)).t(),
        "strided": random_tensor(dtype, (9,))[1::3],
        "rows": matrix[1:3],
    }
    for loaded in all_ways(place, value):
        assert same(value, loaded)
        assert loaded["rows"].untyped_storage().data_ptr() == loaded["matrix"].untyped_storage().data_ptr()


def test_the_dtypes_are_all_that_torch_can_save():
    missing = {str(dtype).removeprefix("torch.") for dtype in set(DTYPES) - set(SAVED)}
    assert missing <= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert {torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.uint16, torch.bool} <= set(SAVED)


def test_quantized_sparse_and_conjugate_tensors_come_back(place):
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
    for loaded in all_ways(place, value, weights_only=False):
        assert same(value, loaded)
        assert loaded["channels"].q_per_channel_scales().tolist() == value["channels"].q_per_channel_scales().tolist()
        assert torch.equal(loaded["affine"].dequantize(), value["affine"].dequantize())


def test_what_shares_memory_is_saved_once_and_shares_it_again(place):
    base = torch.rand(1000)
    weight = torch.nn.Parameter(torch.rand(20, 20))
    value = {"base": base, "part": base[10:20], "encoder": weight, "decoder": weight}
    for loaded in all_ways(place, value):
        assert loaded["encoder"] is loaded["decoder"]
        loaded["base"][10] = 7.0
        assert loaded["part"][0] == 7.0
    assert len(place.body("ours.pt")) < 4 * (1000 + 400) + 4096


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("seen", torch.tensor(3))


def test_modules_optimizers_and_what_unpickling_looks_at_come_back(place):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net.layer(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(7)
    value = {"net": net, "optimizer": optimizer.state_dict(), "generator": generator, "random": random.getstate()}
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    for loaded in all_ways(place, value, weights_only=False):
        assert same(dict(net.state_dict()), dict(loaded["net"].state_dict()))
        assert same(value["optimizer"], loaded["optimizer"])
        assert torch.equal(torch.rand(3, generator=loaded["generator"]), expected)
        assert loaded["random"] == value["random"]


def test_what_is_saved_where_torch_skips_data_is_whole(place):
    value = {"a": torch.rand(10), "b": torch.rand(300)}
    for copied_bytes in (0, MIB):
        with mock.patch.object(planning, "_COPIED_BYTES", copied_bytes), torch.serialization.skip_data():
            save(place, value)
        assert same(value, load(place))


def test_ten_thousand_tensors_come_back(place):
    value = {f"layer.{number}": torch.full((number % 7,), number) for number in range(10_000)}
    result = save(place, value)
    assert zipfile.ZipFile(io.BytesIO(place.body("ckpt.pt"))).testzip() is None
    assert result == (f"{place.url}/ckpt.pt", len(place.body("ckpt.pt")), result.version)
    assert same(value, load(place))
    # The directory and the pickle are larger than what is fetched of the ends.
    assert same({"layer.77": value["layer.77"]}, load(place, keys=["layer.77"]))


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


@settings(max_examples=100, deadline=None)
@given(objects, st.booleans(), st.booleans())
def test_any_object_comes_back(value, checksum, weights_only):
    result = torchobj.save(value, "memory://properties/any.pt", checksum=checksum)
    body = torchobj.Store("memory://properties").get("any.pt")
    assert result.size == len(body)
    assert same(value, torchobj.load("memory://properties/any.pt", weights_only=weights_only))
    assert same(value, torch.load(io.BytesIO(body), weights_only=weights_only))


def test_checkpoints_come_back_from_every_server(any_place):
    value = {"w": random_tensor(torch.float32, (9 * MIB,)), "b": torch.rand(7), "n": 3}
    result = save(any_place, value, "step 1/é.pt")
    assert result.size == len(any_place.body("step 1/é.pt"))
    assert same(value, torch.load(io.BytesIO(any_place.body("step 1/é.pt"))))
    assert same(value, load(any_place, "step 1/é.pt"))
    assert any_place.uploads() == []


def test_a_small_checkpoint_takes_two_requests_and_a_large_one_few_more(place, control):
    for count, most in ((100_000, 3), (12 * MIB, 16)):
        save(place, {"w": torch.rand(count), "b": torch.rand(3)})
        control.forget_requests()
        load(place)
        requests = control.requests()
        assert {request.operation for request in requests} == {"GetObject"}
        assert len(requests) <= most


def test_files_without_checksums_load_and_the_log_may_say_so(place, caplog):
    caplog.set_level(logging.DEBUG, "torchobj")
    value = {"w": torch.rand(1000)}
    save(place, value, checksum=False)
    assert {
        entry.CRC
        for entry in zipfile.ZipFile(io.BytesIO(place.body("ckpt.pt"))).infolist()
        if "/data/" in entry.filename
    } == {0}
    assert same(value, load(place))
    assert "ckpt.pt: data/0: not verified: the file has no CRC-32 of it" in caplog.text
    torch.serialization.set_crc32_options(False)
    try:
        put_stock(place, "stock.pt", value)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(value, load(place, "stock.pt"))


def flip(place, key, at, to="flipped.pt"):
    body = bytearray(place.body(key))
    body[at] ^= 1
    place.boto.put_object(Bucket=place.bucket, Key=to, Body=bytes(body))


def payload_of(place, key, tensor):
    return place.body(key).index(raw(tensor))


@pytest.mark.parametrize("count", [100, 3 * MIB])
def test_a_flipped_byte_names_the_tensor_and_loads_only_unverified(place, count):
    value = {"model": {"layer1.weight": torch.rand(count), "other": torch.rand(9)}, "list": [torch.rand(5)]}
    save(place, value)
    flip(place, "ckpt.pt", payload_of(place, "ckpt.pt", value["model"]["layer1.weight"]) + 4 * count - 1)
    with pytest.raises(exceptions.IntegrityError, match=r"flipped\.pt: model\.layer1\.weight .*CRC-32") as caught:
        load(place, "flipped.pt")
    assert place.url in str(caught.value)
    assert not same_or_false(value, load(place, "flipped.pt", verify=False))
    # What is not read is not looked at.
    assert same({"list": value["list"]}, load(place, "flipped.pt", keys=["list"]))
    flip(place, "ckpt.pt", payload_of(place, "ckpt.pt", value["list"][0]))
    with pytest.raises(exceptions.IntegrityError, match=r"list\.0"):
        load(place, "flipped.pt")


def same_or_false(left, right):
    try:
        return same(left, right)
    except AssertionError:
        return False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3), st.booleans()
)
def test_a_damaged_file_is_an_error_or_the_same_object_and_never_another(flips, near_the_end):
    value = {"model": {"a": torch.arange(50), "b": torch.ones(300)}, "list": [torch.rand(5), 3]}
    torchobj.save(value, "memory://damaged/good.pt")
    store = torchobj.Store("memory://damaged")
    body = bytearray(store.get("good.pt"))
    start = body.index(b"PK\x01\x02") if near_the_end else 0
    for fraction, change in flips:
        body[start + int(fraction * (len(body) - start))] ^= change
    store.put("bad.pt", bytes(body))
    try:
        loaded = torchobj.load("memory://damaged/bad.pt")
    except exceptions.TorchobjError:
        return
    assert same(value, loaded)


def test_a_flipped_byte_of_the_pickle_is_seen(place):
    save(place, {"weight": torch.rand(3)})
    flip(place, "ckpt.pt", place.body("ckpt.pt").index(b"weight"))
    with pytest.raises(exceptions.IntegrityError, match=r"data\.pkl"):
        load(place, "flipped.pt")


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_a_short_object_is_no_checkpoint(place, fraction):
    save(place, {"w": torch.rand(300_000)})
    body = place.body("ckpt.pt")
    place.boto.put_object(Bucket=place.bucket, Key="short.pt", Body=body[: int(len(body) * fraction)])
    with pytest.raises(exceptions.CheckpointError, match=r"short\.pt: it is (empty|an archive without an end)"):
        load(place, "short.pt")


def other_zip(method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("some/file.txt", b"text" * 100)
    return out.getvalue()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"just text", "no file of torch.save"),
        (b"\x80\x02}q\x00.", "no file of torch.save"),
        (other_zip(), r"no data\.pkl"),
        (b"PK\x03\x04" + bytes(100), "without an end"),
        (b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + b"\xff" * 18, "behind its end"),
    ],
)
def test_what_is_no_checkpoint_is_a_clear_error(place, body, message):
    place.boto.put_object(Bucket=place.bucket, Key="bad", Body=body)
    with pytest.raises(exceptions.CheckpointError, match=rf"^{place.url}/bad: .*{message}"):
        load(place, "bad")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_mixture(place, monkeypatch):
    save(place, {"w": torch.zeros(3 * MIB)})
    from torchobj.checkpoint.outline import outline_of

    def replaced(data):
        save(place, {"w": torch.ones(3 * MIB)})
        return outline_of(data)

    monkeypatch.setattr("torchobj.checkpoint.load.outline_of", replaced)
    with pytest.raises(exceptions.ObjectChangedError):
        load(place, verify=False)


def test_what_is_missing_is_not_found(place):
    with pytest.raises(exceptions.ObjectNotFoundError):
        load(place, "nothing.pt")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "ftp://bucket/key", "/local/file.pt", 3])
def test_a_url_of_no_object_is_refused_before_anything_is_done(url):
    with pytest.raises(exceptions.ConfigError):
        torchobj.save({}, url)
    with pytest.raises(exceptions.ConfigError):
        torchobj.load(url)


class Weird:
    def __reduce__(self):
        return (exec, ("raise SystemError('it ran')",))


def test_code_is_refused_unless_asked_for_and_is_named(place):
    put_stock(place, "code.pt", {"x": torch.rand(3 * MIB), "code": Weird()})
    with pytest.raises(exceptions.CheckpointError, match=r"code\.pt: it holds builtins\.exec, .*weights_only=False"):
        load(place, "code.pt")
    with pytest.raises(SystemError, match="it ran"):
        load(place, "code.pt", weights_only=False)


def test_a_site_may_force_weights_only_as_for_torch(place, monkeypatch):
    put_stock(place, "code.pt", Weird())
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(exceptions.CheckpointError, match=r"builtins\.exec"):
        load(place, "code.pt", weights_only=False)


def test_what_is_allowed_is_not_refused(place):
    put_stock(place, "random.pt", {"point": Point(1, 2)})
    with pytest.raises(exceptions.CheckpointError, match="Point"):
        load(place, "random.pt")
    with torch.serialization.safe_globals([Point]):
        assert load(place, "random.pt") == {"point": Point(1, 2)}


class Point(NamedTuple):
    x: int
    y: int


def test_an_object_that_cannot_be_pickled_sends_nothing(place, control):
    save(place, {"good": torch.ones(2)})
    control.forget_requests()
    with pytest.raises(Exception, match="lambda"):
        save(place, {"w": torch.rand(4 * MIB), "bad": lambda: 1})
    assert list(control.requests()) == []
    assert same({"good": torch.ones(2)}, load(place))


@pytest.mark.parametrize(
    ("operation", "count"), [("PutObject", 100), ("UploadPart", 8 * MIB), ("CompleteMultipartUpload", 8 * MIB)]
)
def test_a_part_that_fails_for_ever_is_the_error_and_leaves_nothing(place, control, operation, count):
    save(place, {"good": torch.ones(2)})
    control.faults({"operation": operation, "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError, match=r"ckpt\.pt"):
        save(place, {"w": torch.rand(count)})
    control.clear_faults()
    assert same({"good": torch.ones(2)}, load(place))
    assert place.uploads() == []


def test_busy_servers_cost_time_and_no_bytes(place, control):
    control.faults({"probability": 0.1, "seed": 3, "action": {"status": 503, "code": "SlowDown"}})
    value = {"w": torch.rand(10 * MIB), "b": [torch.rand(1000) for _ in range(10)]}
    for number in range(3):
        save(place, value, f"{number}.pt")
        assert same(value, load(place, f"{number}.pt"))
    control.clear_faults()
    assert zipfile.ZipFile(io.BytesIO(place.body("2.pt"))).testzip() is None
    assert place.uploads() == []


def test_an_object_that_must_not_exist_is_not_replaced(place):
    save(place, {"first": 1}, if_none_match=True)
    with pytest.raises(exceptions.PreconditionFailedError):
        save(place, {"second": 2}, if_none_match=True)
    assert load(place) == {"first": 1}


MODEL = {
    "model": {
        "layer1.weight": torch.rand(300_000),
        "layer1.bias": torch.rand(3),
        "layer10.weight": torch.rand(300_000),
    },
    "optimizer": {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.rand(9)}}, "param_groups": [{"lr": 0.1}]},
    "epoch": 3,
}


def test_keys_select_entries_and_what_is_below_them(place, control):
    save(place, MODEL)
    control.forget_requests()
    model = MODEL["model"]
    expected = {"model": {"layer1.weight": model["layer1.weight"], "layer1.bias": model["layer1.bias"]}}
    assert same(expected, load(place, keys=["model.layer1"]))
    # Not that of layer10, which is as large.
    assert sum(request.bytes_sent for request in control.requests()) < 1_200_000 + 700_000
    assert same({"model": model}, load(place, keys=["model", "model.layer1.weight"]))
    assert same({"optimizer": {"state": MODEL["optimizer"]["state"]}}, load(place, keys=["optimizer.state.0"]))
    assert same({"optimizer": MODEL["optimizer"], "epoch": 3}, load(place, keys=["epoch", "optimizer"]))
    assert load(place, keys=[]) == {}


def test_a_key_that_names_nothing_shows_what_is_near(place):
    save(place, MODEL)
    with pytest.raises(exceptions.ConfigError, match=r"'model\.layer2\.weight'; near it: .*model\.layer1\.weight"):
        load(place, keys=["epoch", "model.layer2.weight"])
    with pytest.raises(exceptions.ConfigError, match="must be a list of names"):
        load(place, keys="epoch")
    save(place, [1, 2])
    with pytest.raises(exceptions.ConfigError, match="no mapping"):
        load(place, keys=["0"])


def blank(value):
    """The same structure with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) if value.is_sparse else torch.full_like(value, 9)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(inner) for inner in value)
    return None


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inner for tensor in tensors_of(part)]


@pytest.mark.parametrize("verify", [True, False])
def test_existing_tensors_are_filled_in_place(place, verify):
    base = torch.rand(8, 8)
    value = {
        **MODEL,
        "views": (base[2:4], base.t(), base[:, 3]),
        "scalar": torch.tensor(4.0),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "bits": random_tensor(torch.bfloat16, (6,)),
    }
    save(place, value)
    into = blank(value)
    into["views"] = (torch.zeros(8, 2).t(), torch.zeros(8, 8), torch.zeros(8))
    before = tensors_of(into)
    versions = [tensor._version for tensor in before]
    assert load(place, into=into, verify=verify) is into
    assert all(left is right for left, right in zip(tensors_of(into), before, strict=True))
    assert all(tensor._version > version for tensor, version in zip(before, versions, strict=True))
    for left, right in zip(tensors_of(into), tensors_of(value), strict=True):
        assert torch.equal(left.to_dense(), right.to_dense()) or raw(left) == raw(right)
    assert into["epoch"] == 3
    assert into["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_tied_tensors_and_parameters_are_filled(place):
    weight = torch.rand(5, 5)
    save(place, {"a": weight, "b": weight, "c": torch.rand(5)})
    tied = torch.nn.Parameter(torch.zeros(5, 5))
    into = {"a": tied, "b": tied, "c": torch.nn.Parameter(torch.zeros(5))}
    load(place, into=into)
    assert torch.equal(tied, weight)
    both = torch.zeros(10)
    save(place, {"low": torch.ones(6), "high": torch.full((6,), 2.0)})
    # They overlap: the bytes in common are of one of them, whole.
    load(place, into={"low": both[:6], "high": both[4:]})
    assert both[:4].eq(1).all() and both[6:].eq(2).all() and both[4] == both[5]


def test_keys_and_into_go_together(place):
    save(place, MODEL)
    into = {"model": {"layer1.bias": torch.zeros(3)}}
    load(place, keys=["model.layer1.bias"], into=into)
    assert torch.equal(into["model"]["layer1.bias"], MODEL["model"]["layer1.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda into: into["model"].update({"layer1.bias": torch.zeros(4)}),
            r"model\.layer1\.bias: .*\(4,\) here, .*\(3,\) in",
        ),
        (
            lambda into: into["model"].update({"layer1.bias": torch.zeros(3, dtype=torch.int32)}),
            r"int32 of .*float32 of",
        ),
        (lambda into: into["model"].update({"layer1.bias": torch.zeros(3, device="meta")}), r"on meta"),
        (lambda into: into["model"].update({"layer1.bias": torch.zeros(1).expand(3)}), r"bias: .*share memory"),
        (
            lambda into: into.update({"optimizer": torch.nn.Linear(1, 1)}),
            r"Linear here, dict in .* give its state_dict\(\)",
        ),
        (lambda into: into.pop("optimizer"), r"optimizer: only in the file; keys=\['model', 'epoch'\] loads a part"),
        (lambda into: into["model"].update({"layer1.bias": 3}), r"int here, Tensor in the file"),
        (lambda into: into["model"].pop("layer1.bias"), r"model\.layer1\.bias: only in the file"),
        (lambda into: into.update({"more": 1}), r"more: not in the file"),
        (lambda into: into["optimizer"].update({"param_groups": []}), r"list of 0 here, list of 1 in the file"),
        (lambda into: into.update({"epoch": torch.zeros(3)}), r"epoch: Tensor here, int in the file"),
    ],
)
def test_what_does_not_fit_is_found_before_a_byte_is_overwritten(place, change, message):
    save(place, MODEL)
    into = blank(MODEL)
    change(into)
    with pytest.raises(exceptions.ConfigError, match=f"into does not fit: .*{message}"):
        load(place, into=into)
    assert into["model"]["layer1.weight"].eq(9).all()
    assert into["epoch"] is None or isinstance(into["epoch"], torch.Tensor)


def test_an_object_that_holds_itself_is_filled(place):
    def cyclic(number):
        shared = (torch.full((2,), float(number)), number)
        value = {"shared": [shared, shared], "number": number}
        value["self"] = [value, (value,)]
        return value

    save(place, cyclic(1))
    assert load(place, keys=["number"]) == {"number": 1}
    into = cyclic(0)
    load(place, into=into)
    assert into["self"][0] is into["self"][1][0] is into
    assert into["number"] == 1
    assert into["shared"][0] is into["shared"][1]
    assert (into["shared"][0][0].tolist(), into["shared"][0][1]) == ([1.0, 1.0], 1)


def test_a_flipped_byte_is_seen_by_into_too(place):
    save(place, MODEL)
    flip(place, "ckpt.pt", payload_of(place, "ckpt.pt", MODEL["model"]["layer10.weight"]) + 77)
    with pytest.raises(exceptions.IntegrityError, match=r"model\.layer10\.weight"):
        load(place, "flipped.pt", into=blank(MODEL))


def test_files_of_torch_before_1_6_are_read_by_torch_and_the_log_says_so(place, caplog):
    caplog.set_level(logging.INFO, "torchobj")
    value = {"a": torch.rand(1000), "b": {"c": torch.ones(2), "d": 1}}
    put_stock(place, "old.pt", value, _use_new_zipfile_serialization=False)
    assert same(value, load(place, "old.pt"))
    assert "old.pt: read by torch.load: it has the format of torch before 1.6" in caplog.text
    assert same({"b": {"c": value["b"]["c"]}}, load(place, "old.pt", keys=["b.c"]))
    into = blank(value)
    load(place, "old.pt", into=into)
    assert same(value, into)
    put_stock(place, "old.pt", {"p": Point(1, 2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(exceptions.CheckpointError, match=r"(?s)old\.pt: .*Point"):
        load(place, "old.pt")


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript", "ignore::DeprecationWarning")
def test_torchscript_is_left_to_torch(place):
    torch.jit.save(torch.jit.trace(Doubled(), torch.ones(1)), out := io.BytesIO())
    place.boto.put_object(Bucket=place.bucket, Key="script.pt", Body=out.getvalue())
    with pytest.raises(RuntimeError, match="TorchScript"):
        load(place, "script.pt")
    assert load(place, "script.pt", weights_only=False)(torch.ones(2)).tolist() == [2, 2]


def test_archives_that_were_compressed_or_repacked_load(place, caplog):
    caplog.set_level(logging.INFO, "torchobj")
    value = {"a": torch.rand(1000), "b": torch.rand(3)}
    stock = zipfile.ZipFile(io.BytesIO(put_stock(place, "stock.pt", value)))
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for name in reversed(stock.namelist()):
                archive.writestr(name, stock.read(name))
        place.boto.put_object(Bucket=place.bucket, Key="packed.pt", Body=out.getvalue())
        assert same(value, load(place, "packed.pt"))
    assert caplog.text.count("packed.pt: read by torch.load: its records are compressed") == 1


def test_records_with_something_between_them_are_found_by_their_headers(place):
    value = {"a": torch.rand(1000), "b": torch.rand(500)}
    body = put_stock(place, "stock.pt", value)
    archive = zipfile.ZipFile(io.BytesIO(body))
    payload = payload_of(place, "stock.pt", value["b"])
    # The last tensor's payload is followed by a stranger, and all that lies behind moves.
    entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/1"))
    cut = payload + entry.file_size + 16
    moved = bytearray(body[:cut] + b"stranger" * 8 + body[cut:])
    shift_offsets(moved, body, cut, 64)
    place.boto.put_object(Bucket=place.bucket, Key="gap.pt", Body=bytes(moved))
    assert same(value, torch.load(io.BytesIO(moved)))
    assert same(value, load(place, "gap.pt"))
    into = blank(value)
    load(place, "gap.pt", into=into)
    assert same(value, into)


def shift_offsets(moved, body, cut, by):
    """Adds `by` to all offsets at or behind `cut` in the directory and the ends of an archive of torch."""
    end = len(moved) - 22
    start = int.from_bytes(body[-6:-2], "little") + by
    moved[end + 16 : end + 20] = start.to_bytes(4, "little")
    locator = end - 20
    moved[locator + 8 : locator + 16] = (locator - 56).to_bytes(8, "little")
    moved[locator - 56 + 48 : locator - 56 + 56] = start.to_bytes(8, "little")
    at = start
    while moved[at : at + 4] == b"PK\x01\x02":
        lengths = [int.from_bytes(moved[at + place : at + place + 2], "little") for place in (28, 30, 32)]
        header = int.from_bytes(moved[at + 42 : at + 46], "little")
        if header >= cut:
            moved[at + 42 : at + 46] = (header + by).to_bytes(4, "little")
        at += 46 + sum(lengths)


def test_files_of_the_other_byte_order_load(place):
    value = {
        "f": torch.rand(10),
        "i": torch.arange(5),
        "c": torch.randn(3, dtype=torch.complex64),
        "b": torch.tensor([True]),
    }
    body = put_stock(place, "big.pt", value)
    archive = zipfile.ZipFile(io.BytesIO(body))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as swapped:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("byteorder"):
                data = b"big"
            elif "/data/" in name:
                tensor = list(value.values())[int(name.rpartition("/")[2])]
                width = tensor.dtype.itemsize // (2 if tensor.is_complex() else 1)
                data = b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))
            swapped.writestr(name, data)
    place.boto.put_object(Bucket=place.bucket, Key="big.pt", Body=out.getvalue())
    assert same(value, load(place, "big.pt"))
    into = blank(value)
    load(place, "big.pt", into=into)
    assert same(value, into)


def test_locations_are_mapped_as_by_torch(place):
    value = {"a": torch.rand(4), "b": torch.rand(2)}
    save(place, value)
    seen = []

    def mapped(storage, location):
        seen.append((storage.nbytes(), location))
        return storage

    assert same(value, load(place, map_location=mapped))
    assert seen == [(16, "cpu"), (8, "cpu")]
    for place_of in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: None):
        assert same(value, load(place, map_location=place_of))


def test_meta_reads_no_tensor(place, control):
    save(place, {"w": torch.rand(3 * MIB)})
    control.forget_requests()
    loaded = load(place, map_location="meta")
    assert loaded["w"].device.type == "meta" and loaded["w"].shape == (3 * MIB,)
    assert sum(request.bytes_sent for request in control.requests()) <= MIB


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_loads(place, protocol):
    value = {"w": torch.rand(5), "array": numpy.arange(4), "set": {1}, "bytes": b"x" * 300, "point": Point(1, 2)}
    put_stock(place, "other.pt", value, pickle_protocol=protocol)
    loaded = load(place, "other.pt", weights_only=False)
    assert numpy.array_equal(loaded.pop("array"), value.pop("array"))
    assert same({**value, "set": None}, {**loaded, "set": None})
    assert loaded["set"] == {1}
    assert same({"w": value["w"]}, load(place, "other.pt", weights_only=False, keys=["w"]))


def test_what_is_saved_and_filled_may_be_a_tensor(place):
    tensor = torch.rand(3, 4).t()
    save(place, tensor)
    assert same(tensor, load(place))
    into = torch.zeros(4, 3)
    assert load(place, into=into) is into
    assert torch.equal(into, tensor)


class Tagged(torch.Tensor):
    """A subclass with nothing of its own."""


def test_subclasses_of_tensors_come_back_and_are_filled(place):
    value = {"w": torch.rand(6).as_subclass(Tagged)}
    for loaded in all_ways(place, value, weights_only=False):
        assert same(value, loaded)
    into = {"w": torch.zeros(6).as_subclass(Tagged)}
    load(place, "ours.pt", into=into, weights_only=False)
    assert same(value, into)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_move_what_is_loaded(place, device):
    value = {"w": torch.rand(6), "t": torch.rand(3, 2).t()}
    save(place, value)
    into = blank(value)
    with torch.device(device):
        save(place, value)
        loaded = load(place)
        load(place, into=into)
    assert same(value, loaded)
    assert same(value, into)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU is missing here")
def test_a_missing_gpu_is_torchs_error_before_anything_is_read(place, control):
    save(place, {"w": torch.rand(3 * MIB)})
    control.forget_requests()
    with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda"):
        load(place, map_location="cuda:0")
    assert sum(request.bytes_sent for request in control.requests()) <= MIB


@pytest.fixture
def staged(monkeypatch):
    """The CPU as a device whose memory nobody can reach."""
    monkeypatch.setattr(staging, "is_reachable", lambda device: False)
    monkeypatch.setattr("torchobj.checkpoint.save.is_reachable", lambda device: False)


def test_tensors_of_devices_come_and_go_through_a_little_memory(place, staged):
    value = {
        "large": random_tensor(torch.uint8, (70 * MIB,)),
        "small": [torch.rand(3), torch.empty(0), torch.tensor(1.0)],
        "exact": random_tensor(torch.uint8, (staging.BLOCK_BYTES,), seed=1),
    }
    save(place, value)
    assert zipfile.ZipFile(io.BytesIO(place.body("ckpt.pt"))).testzip() is None
    assert same(value, load(place))
    into = blank(value)
    load(place, into=into)
    assert same(value, into)
    flip(place, "ckpt.pt", payload_of(place, "ckpt.pt", value["exact"]) + 5)
    with pytest.raises(exceptions.IntegrityError, match="exact"):
        load(place, "flipped.pt")


@pytest.mark.parametrize("renewed", [True, False])
def test_credentials_that_expire_in_the_middle_of_an_upload(
    place, control, strict_server, staged, monkeypatch, tmp_path, renewed
):
    save(place, {"good": 1})
    issued, aws = tmp_path / "credentials.json", tmp_path / "config"
    aws.write_text(f"[profile turning]\ncredential_process = cat {issued}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(aws))

    def issue(number, life_s=3600.0):
        identity = {"AccessKeyId": f"AKIA{number}", "SecretAccessKey": "S" * 20, "SessionToken": f"token-{number}"}
        control.account(f"AKIA{number}", "S" * 20, token=f"token-{number}", expires_in_s=life_s)
        issued.write_text(json.dumps({"Version": 1, **identity}))

    def taken(storage):
        for number, block in enumerate(staging.taken(storage)):
            if number == 4:
                issue(1, life_s=0.0)
                if renewed:
                    issue(2)
            yield block

    issue(1)
    monkeypatch.setattr("torchobj.checkpoint.save.taken", taken)
    config = with_profile(place.config, "turning")
    value = {"w": random_tensor(torch.uint8, (70 * MIB,))}
    if renewed:
        torchobj.save(value, f"{place.url}/ckpt.pt", config=config)
        assert zipfile.ZipFile(io.BytesIO(place.body("ckpt.pt"))).testzip() is None
    else:
        with pytest.raises(exceptions.StoreError, match="(?i)expired|credential"):
            torchobj.save(value, f"{place.url}/ckpt.pt", config=config)
        assert load(place) == {"good": 1}


def test_what_cannot_be_planned_is_streamed_and_the_log_says_so(place, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "torchobj")

    def refuse(*_):
        raise RuntimeError("no skipping here")

    monkeypatch.setattr(torch.serialization, "skip_data", refuse)
    value = {"w": torch.rand(100)}
    result = save(place, value)
    assert "ckpt.pt: streamed by torch.save: torch could not write a plan: no skipping here" in caplog.text
    assert (result.size, result.version) == (
        len(place.body("ckpt.pt")),
        place.boto.head_object(Bucket=place.bucket, Key="ckpt.pt")["ETag"],
    )
    assert same(value, load(place))


def test_folders_hold_checkpoints_too(tmp_path):
    value = {"w": torch.rand(3 * MIB), "n": 1}
    url = f"file://{tmp_path}/deep/ckpt.pt"
    assert torchobj.save(value, url).size == (tmp_path / "deep" / "ckpt.pt").stat().st_size
    assert same(value, torchobj.load(url))
    assert same(value, torch.load(tmp_path / "deep" / "ckpt.pt"))
