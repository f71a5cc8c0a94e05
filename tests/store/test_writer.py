"""A writer's object appears when it is closed without an earlier failure, and at no other time."""

import dataclasses
import functools
import gc
import io
import logging
import pickle
import subprocess
import sys
import types
import zipfile

import numpy
import pytest
import torch

import torchobj
from tests.strict.control import FaultAction
from tests.support import warm_python
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import eventually
from torchobj import _torchobj, exceptions

pytestmark = pytest.mark.providers("s3", "gs")

STATE = {"weight": torch.arange(1000.0), "bias": torch.ones(3)}


def saved(state=STATE):
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


@pytest.fixture
def good(bucket):
    """A checkpoint saved earlier, which later operations must not damage."""
    bucket.write("ckpt.pt", saved())
    return bucket


def still_good(bucket):
    loaded = torch.load(io.BytesIO(bucket.body("ckpt.pt")))
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert bucket.uploads() == []
    return True


def checkpoint(bucket):
    if bucket.url.startswith("s3:"):
        return torchobj.S3Checkpoint(s3client_config=bucket.config)
    opened = functools.partial(torchobj.open, config=bucket.config)
    return types.SimpleNamespace(writer=lambda url: opened(url, "wb"), reader=lambda url: opened(url, "rb"))


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_torch_loads_what_torch_saved(any_bucket, size):
    state = {"a": torch.rand(size), "b": torch.zeros((), dtype=torch.int64), "c": torch.tensor([])}
    with checkpoint(any_bucket).writer(f"{any_bucket.url}/step 1.pt") as writer:
        torch.save(state, writer)
    for loaded in (
        torch.load(io.BytesIO(any_bucket.body("step 1.pt"))),
        torch.load(checkpoint(any_bucket).reader(f"{any_bucket.url}/step 1.pt")),
    ):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert any_bucket.uploads() == []


@pytest.mark.providers("s3")
def test_a_large_object_is_written_in_parts_and_a_small_one_by_one_put(bucket, control):
    for name, size, operations in (
        ("small", 100, ["PutObject"]),
        ("large", 20 << 20, ["CompleteMultipartUpload", "CreateMultipartUpload", *["UploadPart"] * 3]),
    ):
        control.clear_requests()
        with torchobj.open(f"{bucket.url}/{name}", "wb", config=bucket.config) as file:
            for _ in range(10):
                assert file.write(bytes(size // 10)) == size // 10
            assert file.tell() == size
        assert sorted(request.operation for request in control.requests()) == operations
        assert len(bucket.body(name)) == size


def test_an_unpicklable_object_keeps_the_old_checkpoint(good):
    with pytest.raises(Exception, match="lambda"), checkpoint(good).writer(f"{good.url}/ckpt.pt") as writer:
        torch.save({**STATE, "bad": lambda: 1}, writer)
    assert still_good(good)


def test_an_unpicklable_object_without_a_with_block_is_an_error_at_close(good):
    writer = checkpoint(good).writer(f"{good.url}/ckpt.pt")
    with pytest.raises(Exception, match="lambda"):
        torch.save({**STATE, "bad": lambda: 1}, writer)
    with pytest.raises(exceptions.CheckpointError, match=r"torch.save failed: nothing was written"):
        writer.close()
    assert still_good(good)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def jit_archive(extra):
    out = io.BytesIO()
    torch.jit.save(torch.jit.trace(Doubled(), torch.ones(1)), out, _extra_files=extra)
    return out.getvalue()


def zip_archive(*names):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_archives_whose_first_record_is_not_a_pickle_are_written(bucket):
    archives = {
        "one": jit_archive({"labels.txt": b"cat"}),
        "many": jit_archive({f"{number:03}.txt": b"x" for number in range(200)}),
        "exported": zip_archive("a/data/weights/weight_0", "a/byteorder", "a/.data/serialization_id"),
        "zip": zip_archive("a/version"),
        "empty zip": zip_archive(),
        "end": zip_archive("a/version")[-22:],
        "end of another": zip_archive("a/version", "a/.data/serialization_id")[-90:],
    }
    for key, archive in archives.items():
        for step in (len(archive), 7):
            with torchobj.open(f"{bucket.url}/{key}", "wb", config=bucket.config) as file:
                for start in range(0, len(archive), step):
                    file.write(archive[start : start + step])
            assert bucket.body(key) == archive, key
    extra = {"labels.txt": ""}
    torch.jit.load(torchobj.open(f"{bucket.url}/one", config=bucket.config), _extra_files=extra)
    assert extra == {"labels.txt": b"cat"}


def test_a_failed_save_is_detected_for_every_way_of_writing(good):
    left = io.BytesIO()
    with pytest.raises(Exception, match="lambda"):
        torch.save({**STATE, "bad": lambda: 1}, left)
    for step in (len(left.getvalue()), 7):
        writer = torchobj.open(f"{good.url}/ckpt.pt", "wb", config=good.config)
        for start in range(0, len(left.getvalue()), step):
            writer.write(left.getvalue()[start : start + step])
        with pytest.raises(exceptions.CheckpointError):
            writer.close()
    assert still_good(good)


def test_any_exception_in_the_block_keeps_the_old_object(good):
    with pytest.raises(ZeroDivisionError), torchobj.open(f"{good.url}/ckpt.pt", "wb", config=good.config) as file:
        file.write(bytes(20 << 20))
        _ = 1 / 0
    assert file.closed
    assert still_good(good)


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize(
    ("operation", "action", "kind"),
    [
        ("UploadPart", {"status": 403, "code": "AccessDenied"}, exceptions.AccessDeniedError),
        ("UploadPart", {"status": 400, "code": "InvalidRequest"}, exceptions.StoreError),
        ("CreateMultipartUpload", {"status": 403, "code": "AccessDenied"}, exceptions.AccessDeniedError),
        ("CompleteMultipartUpload", {"status": 403, "code": "AccessDenied"}, exceptions.AccessDeniedError),
        ("CompleteMultipartUpload", {"status": 400, "code": "InvalidPart"}, exceptions.StoreError),
        ("PutObject", {"status": 403, "code": "AccessDenied"}, exceptions.AccessDeniedError),
    ],
)
def test_the_raised_error_is_the_stores_and_not_torchs(good, control, operation, action: FaultAction, kind):
    control.faults({"operation": operation, "action": action})
    state = STATE if operation == "PutObject" else {"w": torch.rand(12_000_000)}
    with pytest.raises(kind) as caught, checkpoint(good).writer(f"{good.url}/ckpt.pt") as writer:
        torch.save(state, writer)
    assert f"{good.url}/ckpt.pt" in str(caught.value)
    assert "unexpected pos" not in str(caught.value)
    assert caught.value.request_id in str(caught.value)
    control.clear_faults()
    assert still_good(good)


def test_a_write_after_a_failure_raises_the_first_error_again(good, control):
    control.faults({"operation": "UploadPart", "action": {"status": 403, "code": "AccessDenied"}})
    writer = torchobj.open(f"{good.url}/ckpt.pt", "wb", config=good.config)
    errors = []
    for _ in range(20):
        try:
            writer.write(bytes(9 << 20))
        except exceptions.AccessDeniedError as error:
            errors.append(error)
    with pytest.raises(exceptions.AccessDeniedError) as caught:
        writer.close()
    assert len(errors) > 1
    assert all(error is caught.value for error in errors)
    control.clear_faults()
    assert still_good(good)


def test_a_dropped_writer_commits_nothing_and_warns(good, caplog):
    caplog.set_level(logging.WARNING)
    writer = torchobj.open(f"{good.url}/ckpt.pt", "wb", config=good.config)
    writer.write(bytes(20 << 20))
    del writer
    gc.collect()
    _torchobj.finish(10.0)
    assert "was dropped before it was closed" in caplog.text
    assert still_good(good)


def test_a_process_that_exits_with_an_open_writer_leaves_no_upload(good):
    script = (
        "import sys, torchobj, pickle\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[2]))\n"
        "file = torchobj.open(sys.argv[1], 'wb', config=config)\n"
        "file.write(bytes(20 << 20))\n"
        "sys.exit(3)\n"
    )
    arguments = [f"{good.url}/ckpt.pt", pickle.dumps(good.config).hex()]
    done = subprocess.run([sys.executable, "-c", script, *arguments], timeout=150)
    assert done.returncode == 3
    assert still_good(good)


def test_a_killed_process_keeps_the_old_object(good):
    script = (
        "import sys, torchobj, pickle\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[2]))\n"
        "file = torchobj.open(sys.argv[1], 'wb', config=config)\n"
        "file.write(bytes(20 << 20))\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [f"{good.url}/ckpt.pt", pickle.dumps(good.config).hex()]
    store = torchobj.Store(good.url, config=good.config)
    with warm_python.Process(["-c", script, *arguments]) as process:
        assert process.stdout.readline() == "written\n"
        # An upload to gs:// exists once the bucket has stored a part of it.
        assert eventually(store.unfinished_uploads)
        process.kill()
        process.wait()
    assert torch.equal(torch.load(io.BytesIO(good.body("ckpt.pt")))["weight"], STATE["weight"])
    [left] = store.unfinished_uploads()
    assert left.key == "ckpt.pt"
    assert store.unfinished_uploads("other") == []
    store.abort_upload(left)
    store.abort_upload(left)

    def swept():
        # The server may store a part that it received before the kill after the upload is aborted.
        for late in store.unfinished_uploads():
            store.abort_upload(late)
        return not good.uploads()

    assert eventually(swept)
    assert still_good(good)


def test_close_is_idempotent_and_a_closed_writer_refuses_writes(bucket):
    file = torchobj.open(f"{bucket.url}/k", "wb", config=bucket.config)
    assert (file.writable(), file.readable(), file.seekable(), file.mode, file.name) == (
        True,
        False,
        False,
        "wb",
        f"{bucket.url}/k",
    )
    file.flush()
    file.close()
    file.close()
    assert bucket.body("k") == b""
    for use in (lambda: file.write(b"x"), file.flush, file.tell):
        with pytest.raises(ValueError, match="closed file"):
            use()
    file = torchobj.open(f"{bucket.url}/never", "wb", config=bucket.config)
    file.write(b"x")
    file.abort()
    file.abort()
    assert bucket.keys() == ["k"]


def test_buffers_of_any_shape_are_written_and_empty_ones_add_nothing(bucket):
    empty = [b"", bytearray(), numpy.zeros((0, 3)), numpy.zeros((3, 0)), numpy.zeros(0), torch.zeros(0, 3)]
    with torchobj.open(f"{bucket.url}/k", "wb", config=bucket.config) as file:
        assert [file.write(data) for data in empty] == [0] * len(empty)
        assert file.write(numpy.arange(6, dtype=numpy.uint8).reshape(2, 3)) == 6
        assert file.write(torch.arange(6, 8, dtype=torch.uint8)) == 2
        assert file.tell() == 8
    assert bucket.body("k") == bytes(range(8))


def test_an_exclusive_writer_never_replaces(bucket):
    with torchobj.open(f"{bucket.url}/k", "xb", config=bucket.config) as file:
        file.write(b"first")
    for size in (10, 20 << 20):
        with pytest.raises(FileExistsError), torchobj.open(f"{bucket.url}/k", "xb", config=bucket.config) as file:
            file.write(bytes(size))
    assert bucket.body("k") == b"first"
    assert bucket.uploads() == []


def test_files_are_written_with_the_same_guarantees(tmp_path):
    url = f"file://{tmp_path}/deep/er/ckpt.pt"
    with torchobj.open(url, "wb") as file:
        torch.save(STATE, file)
    assert torch.equal(torch.load(torchobj.open(url))["weight"], STATE["weight"])
    with pytest.raises(ZeroDivisionError), torchobj.open(url, "wb") as file:
        file.write(bytes(20 << 20))
        _ = 1 / 0
    assert torch.equal(torch.load(torchobj.open(url))["weight"], STATE["weight"])
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["ckpt.pt"]


def test_four_bytes_of_a_large_object_do_not_fetch_it(bucket, control):
    torchobj.Store(bucket.url, config=bucket.config).put("large", bytes(64 << 20))
    control.clear_requests()
    reader = checkpoint(bucket).reader(f"{bucket.url}/large")
    assert reader.read(4) == bytes(4)
    reader.seek(-4, 2)
    assert reader.read() == bytes(4)
    reader.close()
    assert sum(request.bytes_sent for request in control.requests()) < 1 << 20


@pytest.mark.parametrize("size", [10, 20 << 20], ids=["one request", "parts"])
def test_a_commit_whose_response_was_lost_succeeds(bucket, control, size):
    config = dataclasses.replace(bucket.config, max_attempts=1)
    operation = "PutObject" if size == 10 else "CompleteMultipartUpload"
    control.faults({"operation": operation, "times": 1, "action": {"lose_response": True}})
    with torchobj.open(f"{bucket.url}/k", "wb", config=config) as file:
        file.write(bytes(size))
    assert len(bucket.body("k")) == size


def test_a_commit_succeeds_when_the_files_of_its_upload_are_swept_meanwhile(tmp_path):
    (tmp_path / "object").write_bytes(b"old")
    config = torchobj.StoreConfig(write_buffer_bytes=16 << 20)
    with torchobj.open(f"file://{tmp_path}/object", "wb", config=config) as file:
        file.write(bytes(64 << 20))
        [key_file] = tmp_path.glob(".torchobj-*.key")
        key_file.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["object"]
    assert (tmp_path / "object").stat().st_size == 64 << 20
