"""Files of other layouts, stores and devices, and files that cannot be planned."""

import io
import json
import logging
import zipfile

import numpy
import pytest
import torch

import torchobj
from tests.support.saved_objects import (
    MIB,
    QUIET,
    Point,
    all_ways,
    blank,
    flip,
    load,
    payload_of,
    put_stock,
    random_tensor,
    same,
    save,
)
from tests.support.settings import with_profile
from torchobj import exceptions
from torchobj.checkpoint.archive import device_memory

pytestmark = [QUIET, pytest.mark.usefixtures("planned")]


def test_files_of_torch_before_1_6_are_read_by_torch_which_is_logged(bucket, caplog):
    caplog.set_level(logging.INFO, "torchobj")
    value = {"a": torch.rand(1000), "b": {"c": torch.ones(2), "d": 1}}
    put_stock(bucket, "old.pt", value, _use_new_zipfile_serialization=False)
    assert same(value, load(bucket, "old.pt"))
    assert "old.pt: read by torch.load: it has the format of torch before 1.6" in caplog.text
    assert same({"b": {"c": value["b"]["c"]}}, load(bucket, "old.pt", keys=["b.c"]))
    into = blank(value)
    load(bucket, "old.pt", into=into)
    assert same(value, into)
    put_stock(bucket, "old.pt", {"p": Point(1, 2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(
        exceptions.CheckpointError, match=r"old\.pt: it contains .*Point, which weights_only="
    ) as refused:
        load(bucket, "old.pt")
    assert not {"\x1b", "\n"} & set(str(refused.value))


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript", "ignore::DeprecationWarning")
def test_torchscript_is_read_by_torch(bucket):
    torch.jit.save(torch.jit.trace(Doubled(), torch.ones(1)), out := io.BytesIO())
    bucket.write("script.pt", out.getvalue())
    with pytest.raises(RuntimeError, match="TorchScript"):
        load(bucket, "script.pt")
    assert load(bucket, "script.pt", weights_only=False)(torch.ones(2)).tolist() == [2, 2]


def test_archives_that_were_compressed_or_repacked_load(bucket, caplog):
    caplog.set_level(logging.INFO, "torchobj")
    value = {"a": torch.rand(1000), "b": torch.rand(3)}
    stock = zipfile.ZipFile(io.BytesIO(put_stock(bucket, "stock.pt", value)))
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for name in reversed(stock.namelist()):
                archive.writestr(name, stock.read(name))
        bucket.write("packed.pt", out.getvalue())
        assert same(value, load(bucket, "packed.pt"))
    assert caplog.text.count("packed.pt: read by torch.load: its records are compressed") == 1


def test_records_with_gaps_between_them_are_located_by_their_headers(bucket):
    value = {"a": torch.rand(1000), "b": torch.rand(500)}
    body = put_stock(bucket, "stock.pt", value)
    archive = zipfile.ZipFile(io.BytesIO(body))
    payload = payload_of(bucket, "stock.pt", value["b"])
    # Inserts bytes after the last tensor's payload, which moves everything after them.
    entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/1"))
    cut = payload + entry.file_size + 16
    moved = bytearray(body[:cut] + b"stranger" * 8 + body[cut:])
    shift_offsets(moved, body, cut, 64)
    bucket.write("gap.pt", bytes(moved))
    assert same(value, torch.load(io.BytesIO(moved)))
    assert same(value, load(bucket, "gap.pt"))
    into = blank(value)
    load(bucket, "gap.pt", into=into)
    assert same(value, into)


def shift_offsets(moved, body, cut, by):
    """Adds `by` to all offsets from `cut` on in the directory and the end of an archive of torch."""
    end = len(moved) - 22
    start = int.from_bytes(body[-6:-2], "little") + by
    moved[end + 16 : end + 20] = start.to_bytes(4, "little")
    locator = end - 20
    moved[locator + 8 : locator + 16] = (locator - 56).to_bytes(8, "little")
    moved[locator - 56 + 48 : locator - 56 + 56] = start.to_bytes(8, "little")
    at = start
    while moved[at : at + 4] == b"PK\x01\x02":
        lengths = [int.from_bytes(moved[at + bucket : at + bucket + 2], "little") for bucket in (28, 30, 32)]
        header = int.from_bytes(moved[at + 42 : at + 46], "little")
        if header >= cut:
            moved[at + 42 : at + 46] = (header + by).to_bytes(4, "little")
        at += 46 + sum(lengths)


def test_files_of_the_other_byte_order_load(bucket):
    value = {
        "f": torch.rand(10),
        "i": torch.arange(5),
        "c": torch.randn(3, dtype=torch.complex64),
        "b": torch.tensor([True]),
    }
    body = put_stock(bucket, "big.pt", value)
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
    bucket.write("big.pt", out.getvalue())
    assert same(value, load(bucket, "big.pt"))
    into = blank(value)
    load(bucket, "big.pt", into=into)
    assert same(value, into)


ENDIANNESS = torch.serialization.LoadEndianness


@pytest.fixture
def default_endianness():
    yield torch.serialization.set_default_load_endianness
    torch.serialization.set_default_load_endianness(None)


@pytest.mark.parametrize("default", [None, *ENDIANNESS])
def test_files_without_a_byte_order_have_torchs_default(bucket, default, default_endianness):
    value = {"f": torch.tensor([1.0, 2.0]), "i": torch.arange(5), "g": {"h": torch.ones(3, dtype=torch.bfloat16)}}
    body = put_stock(bucket, "stock.pt", value)
    body = rewritten(body, lambda name, data: [] if name.endswith("byteorder") else [data])
    bucket.write("stock.pt", body)
    default_endianness(default)
    expected = torch.load(io.BytesIO(body))
    assert bool(expected["f"][0] == 1.0) is (default is not ENDIANNESS.BIG)
    assert same(expected, load(bucket, "stock.pt"))
    assert same({"g": expected["g"]}, load(bucket, "stock.pt", keys=["g.h"]))
    into = blank(value)
    load(bucket, "stock.pt", into=into)
    assert same(expected, into)
    state = {"f": torch.zeros(2), "i": torch.zeros(5, dtype=torch.int64)}
    load(bucket, "stock.pt", keys=["f", "i"], into=state)
    assert same({"f": expected["f"], "i": expected["i"]}, state)


@pytest.mark.parametrize("default", [None, ENDIANNESS.BIG])
def test_the_byte_order_of_a_file_takes_precedence_over_the_default(bucket, default, default_endianness):
    value = {"f": torch.tensor([1.0, 2.0])}
    put_stock(bucket, "stock.pt", value)
    default_endianness(default)
    assert same(value, load(bucket, "stock.pt"))


def rewritten(body, change):
    """An archive with other records: `change` returns those that replace one."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as archive, zipfile.ZipFile(out, "w") as new:
        for name in archive.namelist():
            for data in change(name, archive.read(name)):
                new.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize("order", [b"", b"middle", b"\xff", b"BIG"])
def test_an_unknown_byte_order_is_refused(bucket, order):
    body = put_stock(bucket, "stock.pt", {"f": torch.ones(2)})
    body = rewritten(body, lambda name, data: [order if name.endswith("byteorder") else data])
    bucket.write("stock.pt", body)
    with pytest.raises(ValueError, match=r"Unknown endianness|decode"):
        torch.load(io.BytesIO(body))
    with pytest.raises(exceptions.CheckpointError, match="neither little nor big"):
        load(bucket, "stock.pt")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("twice", ["data.pkl", "data/0", "byteorder"])
def test_an_archive_with_two_records_of_one_name_is_refused(bucket, twice):
    body = put_stock(bucket, "stock.pt", {"f": torch.ones(2)})
    other = {"byteorder": b"big", "data/0": torch.zeros(2).numpy().tobytes()}

    def change(name, data):
        return [data, other.get(twice, data)] if name.endswith(twice) else [data]

    bucket.write("stock.pt", rewritten(body, change))
    for arguments in ({}, {"keys": ["f"]}, {"into": {"f": torch.zeros(2)}}, {"verify": False}):
        with pytest.raises(exceptions.CheckpointError, match=rf"stock.pt: the archive has two records '{twice}'"):
            load(bucket, "stock.pt", **arguments)


def test_locations_are_mapped_as_by_torch(bucket):
    value = {"a": torch.rand(4), "b": torch.rand(2)}
    save(bucket, value)
    seen = []

    def mapped(storage, location):
        seen.append((storage.nbytes(), location))
        return storage

    assert same(value, load(bucket, map_location=mapped))
    assert seen == [(16, "cpu"), (8, "cpu")]
    for place_of in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: None):
        assert same(value, load(bucket, map_location=place_of))


def test_meta_reads_no_tensor(bucket, control):
    save(bucket, {"w": torch.rand(3 * MIB)})
    control.clear_requests()
    loaded = load(bucket, map_location="meta")
    assert loaded["w"].device.type == "meta" and loaded["w"].shape == (3 * MIB,)
    assert sum(request.bytes_sent for request in control.requests()) <= MIB


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_loads(bucket, protocol):
    value = {"w": torch.rand(5), "array": numpy.arange(4), "set": {1}, "bytes": b"x" * 300, "point": Point(1, 2)}
    put_stock(bucket, "other.pt", value, pickle_protocol=protocol)
    loaded = load(bucket, "other.pt", weights_only=False)
    assert numpy.array_equal(loaded.pop("array"), value.pop("array"))
    assert same({**value, "set": None}, {**loaded, "set": None})
    assert loaded["set"] == {1}
    assert same({"w": value["w"]}, load(bucket, "other.pt", weights_only=False, keys=["w"]))


def test_a_single_tensor_is_saved_and_filled(bucket):
    tensor = torch.rand(3, 4).t()
    save(bucket, tensor)
    assert same(tensor, load(bucket))
    into = torch.zeros(4, 3)
    assert load(bucket, into=into) is into
    assert torch.equal(into, tensor)


class Tagged(torch.Tensor):
    """A subclass without additions."""


def test_subclasses_of_tensors_round_trip_and_are_filled(bucket):
    value = {"w": torch.rand(6).as_subclass(Tagged)}
    for loaded in all_ways(bucket, value, weights_only=False):
        assert same(value, loaded)
    into = {"w": torch.zeros(6).as_subclass(Tagged)}
    load(bucket, "ours.pt", into=into, weights_only=False)
    assert same(value, into)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_move_loaded_tensors(bucket, device):
    value = {"w": torch.rand(6), "t": torch.rand(3, 2).t()}
    save(bucket, value)
    into = blank(value)
    with torch.device(device):
        save(bucket, value)
        loaded = load(bucket)
        load(bucket, into=into)
    assert same(value, loaded)
    assert same(value, into)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU is missing here")
def test_a_missing_gpu_raises_torchs_error_before_tensors_are_read(bucket, control):
    save(bucket, {"w": torch.rand(3 * MIB)})
    control.clear_requests()
    with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda"):
        load(bucket, map_location="cuda:0")
    assert sum(request.bytes_sent for request in control.requests()) <= MIB


@pytest.fixture
def staged(monkeypatch):
    """Treats the CPU as a device whose memory is not accessible."""
    monkeypatch.setattr(device_memory, "is_reachable", lambda device: False)
    monkeypatch.setattr("torchobj.checkpoint.archive.save.is_reachable", lambda device: False)


def test_tensors_of_devices_are_saved_and_loaded_through_blocks(bucket, staged):
    value = {
        "large": random_tensor(torch.uint8, (70 * MIB,)),
        "small": [torch.rand(3), torch.empty(0), torch.tensor(1.0)],
        "exact": random_tensor(torch.uint8, (device_memory.BLOCK_BYTES,), seed=1),
    }
    save(bucket, value)
    assert zipfile.ZipFile(io.BytesIO(bucket.body("ckpt.pt"))).testzip() is None
    assert same(value, load(bucket))
    into = blank(value)
    load(bucket, into=into)
    assert same(value, into)
    flip(bucket, "ckpt.pt", payload_of(bucket, "ckpt.pt", value["exact"]) + 5)
    with pytest.raises(exceptions.IntegrityError, match="exact"):
        load(bucket, "flipped.pt")


@pytest.mark.parametrize("renewed", [True, False])
def test_credentials_that_expire_during_an_upload(
    bucket, control, strict_server, staged, monkeypatch, tmp_path, renewed
):
    save(bucket, {"good": 1})
    issued, aws = tmp_path / "credentials.json", tmp_path / "config"
    aws.write_text(f"[profile turning]\ncredential_process = cat {issued}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(aws))

    def issue(number, life_s=3600.0):
        identity = {"AccessKeyId": f"AKIA{number}", "SecretAccessKey": "S" * 20, "SessionToken": f"token-{number}"}
        control.account(f"AKIA{number}", "S" * 20, token=f"token-{number}", expires_in_s=life_s)
        issued.write_text(json.dumps({"Version": 1, **identity}))

    def blocks_of(storage):
        for number, block in enumerate(device_memory.blocks_of(storage)):
            if number == 4:
                issue(1, life_s=0.0)
                if renewed:
                    issue(2)
            yield block

    issue(1)
    monkeypatch.setattr("torchobj.checkpoint.archive.save.blocks_of", blocks_of)
    config = with_profile(bucket.config, "turning")
    value = {"w": random_tensor(torch.uint8, (70 * MIB,))}
    if renewed:
        torchobj.save(value, f"{bucket.url}/ckpt.pt", config=config)
        assert zipfile.ZipFile(io.BytesIO(bucket.body("ckpt.pt"))).testzip() is None
    else:
        with pytest.raises(exceptions.StoreError, match="(?i)expired|credential"):
            torchobj.save(value, f"{bucket.url}/ckpt.pt", config=config)
        assert load(bucket) == {"good": 1}


def test_files_that_cannot_be_planned_are_streamed_which_is_logged(bucket, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "torchobj")

    def refuse(*_):
        raise RuntimeError("no skipping here")

    monkeypatch.setattr(torch.serialization, "skip_data", refuse)
    value = {"w": torch.rand(100)}
    result = save(bucket, value)
    assert "ckpt.pt: streamed by torch.save: torch could not write a plan: no skipping here" in caplog.text
    assert (result.size, result.version) == (
        len(bucket.body("ckpt.pt")),
        bucket.version("ckpt.pt"),
    )
    assert same(value, load(bucket))


def test_file_stores_hold_checkpoints_too(tmp_path):
    value = {"w": torch.rand(3 * MIB), "n": 1}
    url = f"file://{tmp_path}/deep/ckpt.pt"
    assert torchobj.save(value, url).size == (tmp_path / "deep" / "ckpt.pt").stat().st_size
    assert same(value, torchobj.load(url))
    assert same(value, torch.load(tmp_path / "deep" / "ckpt.pt"))
