"""Files that are damaged, refused, missing or not checkpoints raise clear errors, and never load as something else."""

import collections
import io
import logging
import pickle
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.saved_objects import MIB, QUIET, Point, flip, load, payload_of, put_stock, same, save
from torchobj import exceptions

pytestmark = [QUIET, pytest.mark.usefixtures("planned")]


def test_files_without_checksums_load_and_a_debug_message_is_logged(bucket, caplog):
    caplog.set_level(logging.DEBUG, "torchobj")
    value = {"w": torch.rand(1000)}
    save(bucket, value, checksum=False)
    assert {
        entry.CRC
        for entry in zipfile.ZipFile(io.BytesIO(bucket.body("ckpt.pt"))).infolist()
        if "/data/" in entry.filename
    } == {0}
    assert same(value, load(bucket))
    assert "ckpt.pt: data/0: not verified: the file has no CRC-32 for it" in caplog.text
    torch.serialization.set_crc32_options(False)
    try:
        put_stock(bucket, "stock.pt", value)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(value, load(bucket, "stock.pt"))


@pytest.mark.parametrize("count", [100, 3 * MIB])
def test_a_flipped_byte_names_the_tensor_and_loads_only_unverified(bucket, count):
    value = {"model": {"layer1.weight": torch.rand(count), "other": torch.rand(9)}, "list": [torch.rand(5)]}
    save(bucket, value)
    flip(bucket, "ckpt.pt", payload_of(bucket, "ckpt.pt", value["model"]["layer1.weight"]) + 4 * count - 1)
    with pytest.raises(exceptions.IntegrityError, match=r"flipped\.pt: model\.layer1\.weight .*CRC-32") as caught:
        load(bucket, "flipped.pt")
    assert bucket.url in str(caught.value)
    assert not same_or_false(value, load(bucket, "flipped.pt", verify=False))
    # Records that are not read are not verified.
    assert same({"list": value["list"]}, load(bucket, "flipped.pt", keys=["list"]))
    flip(bucket, "ckpt.pt", payload_of(bucket, "ckpt.pt", value["list"][0]))
    with pytest.raises(exceptions.IntegrityError, match=r"list\.0"):
        load(bucket, "flipped.pt")


def same_or_false(left, right):
    try:
        return same(left, right)
    except AssertionError:
        return False


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3), st.booleans()
)
def test_a_damaged_file_raises_or_loads_the_same_object(flips, near_the_end):
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


def test_a_flipped_byte_of_the_pickle_is_detected(bucket):
    save(bucket, {"weight": torch.rand(3)})
    flip(bucket, "ckpt.pt", bucket.body("ckpt.pt").index(b"weight"))
    with pytest.raises(exceptions.IntegrityError, match=r"data\.pkl"):
        load(bucket, "flipped.pt")


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_object_is_not_a_checkpoint(bucket, fraction):
    save(bucket, {"w": torch.rand(300_000)})
    body = bucket.body("ckpt.pt")
    bucket.write("short.pt", body[: int(len(body) * fraction)])
    with pytest.raises(exceptions.CheckpointError, match=r"short\.pt: it is (empty|an archive without an end)"):
        load(bucket, "short.pt")


def other_zip(method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("some/file.txt", b"text" * 100)
    return out.getvalue()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"just text", "not a file of torch.save"),
        (b"\x80\x02}q\x00.", "not a file of torch.save"),
        (other_zip(), r"no data\.pkl"),
        (b"PK\x03\x04" + bytes(100), "without an end"),
        (b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + b"\xff" * 18, "beyond its end"),
    ],
)
def test_other_files_raise_a_clear_error(bucket, body, message):
    bucket.write("bad", body)
    with pytest.raises(exceptions.CheckpointError, match=rf"^{bucket.url}/bad: .*{message}"):
        load(bucket, "bad")


def test_a_checkpoint_that_is_replaced_during_a_load_raises(bucket, monkeypatch):
    save(bucket, {"w": torch.zeros(3 * MIB)})
    from torchobj.checkpoint.archive.pickling import Outline

    def replaced(data):
        save(bucket, {"w": torch.ones(3 * MIB)})
        return Outline(data)

    monkeypatch.setattr("torchobj.checkpoint.archive.load.Outline", replaced)
    with pytest.raises(exceptions.ObjectChangedError):
        load(bucket, verify=False)


def test_a_missing_object_raises_object_not_found(bucket):
    with pytest.raises(exceptions.ObjectNotFoundError):
        load(bucket, "nothing.pt")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "ftp://bucket/key", "/local/file.pt", 3])
def test_a_url_without_a_key_is_refused_first(url):
    with pytest.raises(exceptions.ConfigError):
        torchobj.save({}, url)
    with pytest.raises(exceptions.ConfigError):
        torchobj.load(url)


class Weird:
    def __reduce__(self):
        return (exec, ("raise SystemError('it ran')",))


def test_code_is_refused_by_default_and_named(bucket):
    put_stock(bucket, "code.pt", {"x": torch.rand(3 * MIB), "code": Weird()})
    with pytest.raises(exceptions.CheckpointError, match=r"code\.pt: it contains builtins\.exec, .*weights_only=False"):
        load(bucket, "code.pt")
    with pytest.raises(SystemError, match="it ran"):
        load(bucket, "code.pt", weights_only=False)


def test_a_site_may_force_weights_only_as_for_torch(bucket, monkeypatch):
    put_stock(bucket, "code.pt", Weird())
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(exceptions.CheckpointError, match=r"builtins\.exec"):
        load(bucket, "code.pt", weights_only=False)


def test_a_user_may_lift_weights_only_where_it_was_not_passed_as_for_torch(bucket, monkeypatch):
    put_stock(bucket, "code.pt", Weird())
    buffer = io.BytesIO(bucket.body("code.pt"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for read in (lambda **passed: load(bucket, "code.pt", **passed), lambda **passed: torch.load(buffer, **passed)):
        with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD .*weights_only=False") as warned:
            with pytest.raises(SystemError, match="it ran"):
                read()
        assert len(warned) == 1
        buffer.seek(0)
    with pytest.raises(exceptions.CheckpointError, match=r"builtins\.exec"):
        load(bucket, "code.pt", weights_only=True)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    for passed in ({}, {"weights_only": True}, {"weights_only": False}):
        with pytest.raises(exceptions.ConfigError, match="are both set"):
            load(bucket, "code.pt", **passed)
        with pytest.raises(RuntimeError, match="both were set"):
            torch.load(buffer, **passed)


def test_allowed_globals_are_not_refused(bucket):
    put_stock(bucket, "random.pt", {"point": Point(1, 2)})
    with pytest.raises(exceptions.CheckpointError, match="Point"):
        load(bucket, "random.pt")
    with torch.serialization.safe_globals([Point]):
        assert load(bucket, "random.pt") == {"point": Point(1, 2)}


def test_nothing_is_sent_if_pickling_fails(bucket, control):
    save(bucket, {"good": torch.ones(2)})
    control.clear_requests()
    with pytest.raises(Exception, match="lambda"):
        save(bucket, {"w": torch.rand(4 * MIB), "bad": lambda: 1})
    assert list(control.requests()) == []
    assert same({"good": torch.ones(2)}, load(bucket))


@pytest.mark.parametrize(
    ("operation", "count"), [("PutObject", 100), ("UploadPart", 8 * MIB), ("CompleteMultipartUpload", 8 * MIB)]
)
def test_a_part_that_keeps_failing_raises_and_leaves_nothing(bucket, control, operation, count):
    save(bucket, {"good": torch.ones(2)})
    control.faults({"operation": operation, "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError, match=r"ckpt\.pt"):
        save(bucket, {"w": torch.rand(count)})
    control.clear_faults()
    assert same({"good": torch.ones(2)}, load(bucket))
    assert bucket.uploads() == []


def test_busy_servers_delay_a_save_without_damage(bucket, control):
    control.faults({"probability": 0.1, "seed": 3, "action": {"status": 503, "code": "SlowDown"}})
    value = {"w": torch.rand(10 * MIB), "b": [torch.rand(1000) for _ in range(10)]}
    for number in range(3):
        save(bucket, value, f"{number}.pt")
        assert same(value, load(bucket, f"{number}.pt"))
    control.clear_faults()
    assert zipfile.ZipFile(io.BytesIO(bucket.body("2.pt"))).testzip() is None
    assert bucket.uploads() == []


def test_an_object_that_must_not_exist_is_not_replaced(bucket):
    save(bucket, {"first": 1}, overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        save(bucket, {"second": 2}, overwrite=False)
    assert load(bucket) == {"first": 1}


def put_with_pickle(bucket, data):
    """Puts a file of `torch.save` whose pickle is replaced by this one."""
    stock, archive = put_stock(bucket, "stock.pt", [torch.zeros(1)]), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stock)) as old, zipfile.ZipFile(archive, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, data if entry.filename.endswith("data.pkl") else old.read(entry))
    bucket.write("ckpt.pt", archive.getvalue())


@pytest.mark.parametrize("opening", [b"(", b"]("])
@pytest.mark.parametrize("weights_only", [True, False])
def test_deep_nesting_is_refused_before_it_is_unpickled(bucket, opening, weights_only):
    # Outlining 20,000 nested tuples took 2 GB.
    depth, closing = 20_000, {b"(": b"t", b"](": b"e"}[opening]
    put_with_pickle(bucket, b"\x80\x02" + opening * depth + b"K\x01" + closing * depth + b".")
    with pytest.raises(exceptions.CheckpointError, match="more than 1000 nested"):
        load(bucket, weights_only=weights_only)


class Storage:
    """Pickled as the storage 0 of a file, with this number of float32."""

    def __init__(self, count):
        self.count = count


class Tensor:
    """Pickled as a tensor with these arguments."""

    def __init__(self, count, *arguments):
        self.arguments = (Storage(count), *arguments, False, collections.OrderedDict())

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


def pickled(value):
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", value.count) if isinstance(value, Storage) else None

    data = io.BytesIO()
    Pickler(data, 2).dump(value)
    return data.getvalue()


@pytest.mark.parametrize(
    "arguments", [(0, (40,), (1,)), (1, (1,), (1,)), (0, (2,), (1,)), (0, (1 << 30,), (1,))], ids=str
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_larger_than_its_storage_is_refused(bucket, arguments, verify):
    # torch enlarges the storage: the tensor had other memory of the process, or other records of the file.
    put_with_pickle(bucket, pickled([Tensor(1, *arguments)]))
    for into in (None, [torch.zeros(arguments[1])] if arguments[1] < (100,) else None):
        with pytest.raises(exceptions.CheckpointError, match="larger than its storage"):
            load(bucket, into=into, verify=verify)


def test_a_memo_larger_than_the_pickle_is_refused(bucket):
    # LONG_BINPUT: 1 GiB for the memo of the unpickler.
    put_with_pickle(bucket, b"\x80\x02]r\x00\x00\x00\x04.")
    with pytest.raises(exceptions.CheckpointError, match="nested"):
        load(bucket)


@pytest.mark.parametrize("count", [-1, -(1 << 62), 1 << 61, 1 << 63, 10**99, 1.5, "1", None])
@pytest.mark.parametrize("into", [None, [torch.zeros(1)]], ids=["new", "into"])
def test_a_storage_of_an_impossible_size_is_refused(bucket, count, into):
    put_with_pickle(bucket, pickled([Storage(count)]))
    with pytest.raises(exceptions.CheckpointError, match="a storage has .* elements"):
        load(bucket, into=into)
