"""The process of the command line: its start, Ctrl-C, pipes, and what it imports."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.interrupting import HELD_BACK_S
from tests.support.prefetching import eventually

ROOT = Path(__file__).parents[2]

#: An upload of three parts.
PARTS, UPLOAD_BYTES = 3, 24 << 20


def test_python_m_torchobj_is_the_same_program(cli, bucket):
    bucket.write("k", b"1")
    done = cli.process("ls", bucket.url, "--bytes")
    assert done.returncode == 0 and done.stdout.split()[1:] == [b"1", b"k"] and done.stderr == b""


def test_ls_imports_neither_torch_nor_rich_nor_other_commands(cli, bucket):
    bucket.write("k", b"1")
    script = (
        "import sys, torchobj.cli; sys.argv = ['torchobj', 'ls', sys.argv[1]]\n"
        "try: torchobj.cli.main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, bucket.url], cwd=ROOT, capture_output=True, text=True)
    modules = set(done.stderr.split())
    assert "torchobj.cli.objects" in modules and " k" in done.stdout
    assert not modules & {
        "torch",
        "numpy",
        "rich",
        "asyncio",
        "http.client",
        "torchobj.cli.doctor",
        "torchobj.cli.bench",
    }


@pytest.mark.parametrize("command", ["checkpoints", "uploads", "doctor", "bench", "scan", "rm"])
def test_no_command_imports_torch(command):
    script = (
        "import sys, torchobj.cli; sys.argv = ['torchobj', sys.argv[1], '--help']\n"
        "try: torchobj.cli.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, command], cwd=ROOT, check=True, capture_output=True)


def test_a_missing_click_is_named_with_the_extra():
    script = "import sys; sys.modules['click'] = None; import torchobj.cli; torchobj.cli.main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "torchobj: click is not installed: pip install 'torchobj[cli]'\n"


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        (["cat", "{}/k"], "GetObject"),
        (["cat", "{}/*"], "GetObject"),
        (["ls", "{}"], "ListObjectsV2"),
        (["bench", "{}"], "GetObject"),
    ],
    ids=["cat", "cat-glob", "ls", "bench"],
)
def test_ctrl_c_ends_a_command_within_a_second(cli, bucket, control, arguments, operation):
    bucket.write("k", bytes(1000))
    control.faults({"operation": operation, "action": {"delay_first_byte_s": HELD_BACK_S}})
    process = cli.start(*[each.format(bucket.url) for each in arguments], stdout=-1, stderr=-1)
    assert eventually(lambda: control.fault_report()[0]["fired"] or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=HELD_BACK_S / 2)
    took_s = time.monotonic() - sent
    assert process.returncode == 130 and err == b"torchobj: interrupted\n"
    assert took_s < HELD_BACK_S / 4, out


def test_a_full_disk_is_an_error_of_one_line(cli, bucket):
    bucket.write("k", bytes(1 << 20))
    with Path("/dev/full").open("wb") as full:
        done = cli.process("cat", f"{bucket.url}/k", stdout=full)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr


@pytest.mark.parametrize("command", [["cp"], ["ls"], ["rm", "--yes"]])
def test_an_argument_that_is_not_utf_8_is_named_escaped(cli, bucket, tmp_path, command):
    path = os.fsencode(tmp_path) + b"/\xff" if command == ["cp"] else bucket.url.encode() + b"/\xff"
    extra = [f"{bucket.url}/u/"] if command == ["cp"] else []
    process = subprocess.run(
        [sys.executable, "-m", "torchobj", *command, path, *extra], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 1 and "\\udcff: is not UTF-8" in process.stderr, process.stderr


def wait_for_all_parts(control, process):
    """Waits until the server has stored all parts of an upload: after its abort, none that is on the way arrives."""

    def stored():
        return sum(part.bytes_received > 0 for part in control.requests("UploadPart")) == PARTS

    assert eventually(lambda: stored() or process.poll() is not None)
    assert process.poll() is None


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated by SIGTERM"),
        (signal.SIGHUP, "terminated by SIGHUP"),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_a_signal_during_an_upload_leaves_nothing(cli, bucket, control, tmp_path, number, message):
    bucket.write("k", b"old")
    (tmp_path / "large").write_bytes(bytes(UPLOAD_BYTES))
    control.faults({"operation": "UploadPart", "skip": 1, "action": {"delay_first_byte_s": HELD_BACK_S}})
    with (tmp_path / "large").open("rb") as file:
        process = cli.start("cp", "-", f"{bucket.url}/k", stdin=file, stdout=-1, stderr=-1)
        wait_for_all_parts(control, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=HELD_BACK_S / 2)
    assert process.returncode == 128 + number and err == f"torchobj: {message}\n".encode()
    assert bucket.body("k") == b"old" and bucket.keys() == ["k"]
    assert bucket.uploads() == []


@pytest.mark.providers("s3", "gs")
def test_a_closed_terminal_aborts_an_upload(cli, bucket, control, tmp_path):
    (tmp_path / "large").write_bytes(bytes(UPLOAD_BYTES))
    control.faults({"operation": "UploadPart", "skip": 1, "action": {"delay_first_byte_s": HELD_BACK_S}})
    ours, theirs = pty.openpty()
    process = cli.start("cp", tmp_path / "large", f"{bucket.url}/k", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for_all_parts(control, process)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HELD_BACK_S / 2) == 128 + signal.SIGHUP
    assert bucket.keys() == [] and bucket.uploads() == []


@pytest.mark.providers("s3", "gs")
def test_a_bar_with_files_bytes_and_rate_is_shown_on_a_terminal(cli, bucket, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1 << 20))
    code, shown = cli.on_terminal("cp", f"{tmp_path}/*.bin", f"{bucket.url}/x/")
    assert code == 0 and "3/3 files" in shown and "3.00 MiB of 3.00 MiB" in shown and "100%" in shown
    assert "copied 3 files, 3.00 MiB, in " in shown


def test_a_command_without_a_terminal_shows_a_summary_only(cli, bucket, tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    done = cli.process("cp", tmp_path / "a", f"{bucket.url}/a")
    assert done.stdout.startswith(b"copied 1 file, 1 B, in ") and done.stdout.count(b"\n") == 1 and done.stderr == b""
