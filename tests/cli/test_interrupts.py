"""A command that a signal ends aborts every upload that it has begun, and names those that it cannot abort."""

import shlex
import signal
import time
from urllib.parse import unquote

import pytest

import torchobj
from tests.support.command_line import CommandLine
from tests.support.interrupting import HELD_BACK_S
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import eventually

#: Files of two parts.
FILES, FILE_BYTES = 8, 17 << 20

BEGIN, PART, ABORT = "CreateMultipartUpload", "UploadPart", "AbortMultipartUpload"

STALLED = {"delay_first_byte_s": HELD_BACK_S}


@pytest.fixture
def tree(tmp_path):
    """A folder of files that are uploaded in parts; they have no blocks on the disk."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for number in range(FILES):
        with (folder / f"{number:02}.bin").open("wb") as file:
            file.truncate(FILE_BYTES)
    return folder


def begun(control):
    """Number of uploads that the server has begun."""
    return sum(request.status == 200 for request in control.requests(BEGIN))


def interrupted(process, *ready, number=signal.SIGINT):
    """Sends a signal once `ready` holds; returns the exit code and what the process wrote to stderr."""
    for holds in ready:
        assert eventually(lambda holds=holds: holds() or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=HELD_BACK_S / 2)
    return process.returncode, err.decode()


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["cp", "-r"], signal.SIGINT),
        (["mv", "-r"], signal.SIGTERM),
        pytest.param(["sync"], signal.SIGINT, marks=pytest.mark.matrix),
        pytest.param(["mv", "-r"], signal.SIGINT, marks=pytest.mark.matrix),
        pytest.param(["cp", "-r"], signal.SIGHUP, marks=pytest.mark.matrix),
    ],
)
def test_a_signal_during_the_upload_of_a_tree_leaves_no_upload(cli, bucket, control, tree, command, number):
    control.faults({"operation": PART, "action": STALLED})
    process = cli.start(*command, f"{tree}/", f"{bucket.url}/x/", stdout=-1, stderr=-1)
    code, err = interrupted(process, lambda: len(control.requests(PART)) >= 6, number=number)
    assert code == 128 + number and "was not aborted" not in err, err
    assert bucket.uploads() == [] and bucket.keys() == []
    assert len(list(tree.iterdir())) == FILES


def test_each_upload_that_was_begun_is_aborted(cli, bucket, control, tree):
    control.faults({"operation": PART, "action": STALLED})
    process = cli.start("cp", "-r", f"{tree}/", f"{bucket.url}/x/", stdout=-1, stderr=-1)
    interrupted(process, lambda: begun(control) >= 6)
    aborted = {request.key for request in control.requests(ABORT)}
    assert len(aborted) == begun(control) >= 6
    assert bucket.uploads() == []


@pytest.mark.providers("s3", "gs")
def test_a_signal_during_uploads_of_several_threads_leaves_no_upload(cli, bucket, control, tree):
    control.faults({"operation": PART, "action": STALLED})
    process = cli.start("cp", *sorted(tree.iterdir()), f"{bucket.url}/x/", stdout=-1, stderr=-1)
    code, err = interrupted(process, lambda: len(control.requests(PART)) >= 6)
    assert code == 130 and "was not aborted" not in err, err
    assert bucket.uploads() == [] and bucket.keys() == []


@pytest.mark.matrix
def test_a_signal_during_streams_between_providers_leaves_no_upload(bucket, gcs_bucket, control, tmp_path, monkeypatch):
    cli = CommandLine(tmp_path, monkeypatch, bucket, gcs_bucket)
    for number in range(3):
        gcs_bucket.write(f"x/{number}", bytes(20 << 20))
    control.faults({"operation": PART, "action": STALLED})
    process = cli.start("cp", "-r", f"{gcs_bucket.url}/x", f"{bucket.url}/y", stdout=-1, stderr=-1)
    code, err = interrupted(process, lambda: len(control.requests(PART)) >= 3)
    assert code == 130 and "was not aborted" not in err, err
    assert bucket.uploads() == [] and bucket.keys() == []


def test_an_upload_whose_beginning_is_answered_after_the_interrupt_is_aborted(cli, bucket, control, tree):
    # The server has begun them all, and responds after the interrupt.
    control.faults({"operation": BEGIN, "action": {"delay_first_byte_s": 3}})
    process = cli.start("cp", "-r", f"{tree}/", f"{bucket.url}/x/", stdout=-1, stderr=-1)
    code, err = interrupted(process, lambda: len(bucket.uploads()) >= 6)
    assert code == 130 and "aborting" in err, err
    assert bucket.uploads() == []


@pytest.mark.parametrize("second", [True, pytest.param(False, marks=pytest.mark.matrix)], ids=["second", "limit"])
def test_what_is_not_aborted_is_named_with_the_command_that_finds_it(cli, bucket, control, tmp_path, second):
    name = "it's $(one) large"
    (tmp_path / name).write_bytes(bytes(FILE_BYTES))
    control.faults({"operation": PART, "action": STALLED}, {"operation": ABORT, "action": {**STALLED, "status": 500}})
    options = ["--region", "us-east-1"]
    process = cli.start("cp", tmp_path / name, f"{bucket.url}/{name}", *options, stdout=-1, stderr=-1)
    assert eventually(lambda: control.requests(PART) or process.poll() is not None)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    if second:
        assert eventually(lambda: control.fault_report()[1]["fired"] or process.poll() is not None)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HELD_BACK_S / 2)
    # At once after the second, otherwise after ten seconds.
    assert process.returncode == 130 and (time.monotonic() - began < 10) == second
    control.clear_faults()
    command = err.decode().splitlines()[-1].split("`")[1]
    words = shlex.split(command)
    assert words == ["torchobj", "uploads", "list", *options, f"{bucket.url}/{name}"]
    [line] = cli.lines(*words[1:])
    [upload] = bucket.uploads()
    assert upload["UploadId"] in line and name in unquote(line)


def test_an_abort_that_is_refused_is_named_with_the_command_that_finds_the_upload(cli, bucket, control, tmp_path):
    (tmp_path / "large").write_bytes(bytes(FILE_BYTES))
    refused = {"status": 403, "code": "AccessDenied"}
    control.faults({"operation": PART, "action": STALLED}, {"operation": ABORT, "action": refused})
    process = cli.start("cp", tmp_path / "large", f"{bucket.url}/k", stdout=-1, stderr=-1)
    code, err = interrupted(process, lambda: control.requests(PART))
    assert code == 130
    assert err.splitlines()[-1].endswith(f"`torchobj uploads list {bucket.url}/k` lists it")
    assert len(bucket.uploads()) == 1


def test_uploads_of_a_local_folder_are_listed(cli, tmp_path):
    with torchobj.open(f"file://{tmp_path}/k", "wb") as file:
        file.write(bytes(17 << 20))
        [line] = cli.lines("uploads", "list", f"file://{tmp_path}/k")
        assert line.endswith(f"file://{tmp_path}/k")
