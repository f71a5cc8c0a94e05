"""The standard streams of the command line: closed, full, or broken pipes."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.command_line import LIMIT_S, ROOT

LOST = b"torchobj: standard output: Bad file descriptor\n"
FULL = b"torchobj: standard output: No space left on device\n"


def run(*arguments, redirections, stdin=b"content"):
    """Runs the program with redirections of a shell, such as `2>&-`."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "torchobj", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, input=stdin, capture_output=True, timeout=LIMIT_S, env=environment)


@pytest.fixture
def folder(tmp_path):
    """A folder with two files."""
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "a").write_bytes(b"1")
    (tmp_path / "d" / "sub" / "b").write_bytes(b"22")
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("redirections", "code", "err"),
    [
        ("2>&-", 0, b""),
        ("<&-", 0, b""),
        ("2>/dev/full", 0, b""),
        pytest.param("<&- 2>&-", 0, b"", marks=pytest.mark.matrix),
        (">&-", 1, LOST),
        (">/dev/full", 1, FULL),
        (">&- 2>&-", 1, b""),
        ("<&- >&- 2>&-", 1, b""),
        pytest.param("<&- >&-", 1, LOST, marks=pytest.mark.matrix),
        pytest.param(">/dev/full 2>/dev/full", 1, b"", marks=pytest.mark.matrix),
    ],
)
def test_a_transfer_with_streams_that_are_closed_or_full_is_made(cli, bucket, folder, redirections, code, err):
    done = run("sync", folder, f"{bucket.url}/x", redirections=redirections)
    assert (done.returncode, done.stderr) == (code, err)
    assert {key: bucket.body(key) for key in bucket.keys()} == {"x/a": b"1", "x/sub/b": b"22"}


COMMANDS = [
    ["ls", "{}"],
    ["cat", "{}/k"],
    ["cat", "{}/*"],
    ["cp", "{}/k", "-"],
    ["head", "{}/k"],
    ["du", "{}"],
    ["scan", "{}"],
    ["rm", "--yes", "{}/k"],
    ["uploads", "list", "{}"],
    ["bench", "{}", "--seconds", "0.1", "--concurrency", "1"],
    ["doctor", "{}"],
    ["completion", "bash"],
    ["--help"],
    ["ls", "--help"],
    ["--version"],
    ["--versions"],
]
IN_TEST = (["ls", "{}"], ["cat", "{}/k"], ["--help"])


@pytest.mark.parametrize("redirections", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[] if each in IN_TEST else pytest.mark.matrix) for each in COMMANDS],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_an_error_of_one_line_as_that_of_coreutils(cli, bucket, command, redirections):
    bucket.write("k", bytes(100))
    done = run(*(each.format(bucket.url) for each in command), redirections=redirections)
    expected = LOST if redirections == ">&-" else FULL
    if command[0] == "uploads":
        expected = b""
    notes = b"deleting " if command[0] == "rm" else b"torchobj: standard output"
    assert done.returncode == (1 if expected else 0)
    assert done.stderr.endswith(expected) and done.stderr.startswith(notes if expected else b"")
    assert subprocess.run(["sh", "-c", f"cat /etc/hostname {redirections}"], capture_output=True).returncode == 1


def test_output_that_cannot_be_written_is_json_with_json(cli, bucket):
    bucket.write("k", b"1")
    done = run("ls", bucket.url, "--json", redirections=">&-")
    assert (done.returncode, done.stderr) == (1, b'{"error": "standard output: Bad file descriptor"}\n')


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full"])
def test_a_failure_without_a_standard_error_has_its_exit_code(cli, bucket, redirections):
    done = run("cat", f"{bucket.url}/missing", redirections=redirections)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    assert run("cat", "--unknown", redirections=redirections).returncode == 2


def test_a_standard_input_that_is_closed_is_named(cli, bucket):
    done = run("cp", "-", f"{bucket.url}/k", redirections="<&-")
    assert (done.returncode, done.stderr) == (1, b"torchobj: standard input: Bad file descriptor\n")
    bucket.write("k", b"1")
    done = run("rm", f"{bucket.url}/k", redirections="<&-")
    assert done.returncode == 1 and b"cannot ask without a terminal" in done.stderr and bucket.keys() == ["k"]


def test_no_file_or_socket_gets_the_number_of_a_closed_stream(cli, bucket, tmp_path):
    script = (
        "import os, sys, torchobj.cli\n"
        "try: torchobj.cli.main()\n"
        "finally:\n"
        "    opened = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        "    sockets = [os.readlink(f'/proc/self/fd/{name}')[:7] for name in os.listdir('/proc/self/fd')[:-1]]\n"
        f"    open({str(tmp_path / 'opened')!r}, 'w').write(f'{{opened}} {{\"socket:\" in sockets}}')\n"
    )
    (tmp_path / "script.py").write_text(script)
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, tmp_path / "script.py", "ls", bucket.url]
    bucket.write("k", b"1")
    assert subprocess.run(shell, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=LIMIT_S).returncode == 1
    assert (tmp_path / "opened").read_text() == "['/dev/null', '/dev/null', '/dev/null'] True"


@pytest.mark.parametrize(
    ("command", "is_shared"),
    [("ls {}", True), ("ls {}", False), ("--help", True), ("ls --unknown", True), ("cat {}/missing", True)],
)
def test_a_broken_pipe_ends_the_program_by_its_signal(cli, bucket, command, is_shared):
    """That of the output and of the messages, or of the output alone, after which there is no message."""
    for number in range(3):
        bucket.write(f"k{number}", b"1")
    reader, writer = os.pipe()
    os.close(reader)
    done = cli.process(
        *command.format(bucket.url).split(), stdout=writer, stderr=writer if is_shared else subprocess.PIPE
    )
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and not done.stderr


def test_the_output_of_a_transfer_that_is_read_in_part_is_discarded(cli, bucket):
    bucket.write("k", bytes(1 << 20))
    done = run("cat", f"{bucket.url}/k", redirections="| head -c 1")
    assert (done.stdout, done.stderr) == (b"\0", b"")
