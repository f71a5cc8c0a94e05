"""Runs the command line for tests: in this process, or as one of its own, on pipes or on a terminal."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from click.testing import CliRunner

from torchobj.cli.options import Settings
from torchobj.cli.program import program

ROOT = Path(__file__).parents[2]

#: Longer than any command of the tests takes.
LIMIT_S = 60.0


def files_of(folder):
    """The files below a folder, by their paths in it."""
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class CommandLine:
    """The program `torchobj` with access to a bucket, by a configuration file and credentials of the environment."""

    def __init__(self, folder, monkeypatch, *buckets):
        file = Path(folder) / "torchobj.toml"
        options = dict(map(_options, buckets))
        file.write_text("".join(f'["{scheme}://"]\n{line}\n' for scheme, line in options.items()))
        monkeypatch.setenv("TORCHOBJ_CONFIG", str(file))
        for bucket in buckets:
            if bucket.url.startswith("gs://"):
                monkeypatch.setenv("GCE_METADATA_HOST", urlsplit(bucket.server.endpoint).netloc)

    def run(self, *arguments, stdin=None):
        """Runs a command in this process."""
        return CliRunner().invoke(program, [str(each) for each in arguments], input=stdin, obj=Settings())

    def lines(self, *arguments):
        """The output of a command that succeeds, as lines."""
        done = self.run(*arguments)
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    def records(self, *arguments):
        """The output of a command that succeeds, with `--json`."""
        return [json.loads(line) for line in self.lines(*arguments, "--json")]

    def failed_records(self, *arguments):
        """The output of a command that fails, with `--json`."""
        done = self.run(*arguments, "--json")
        assert done.exit_code == 1, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    def checks(self, *arguments, fails=False):
        """The checks of `doctor` by their names, of which none fails, or some."""
        records = self.failed_records if fails else self.records
        return {check["name"]: check for check in records("doctor", *arguments)}

    def error(self, *arguments, code=1):
        """The message of a command that fails, which is one line."""
        done = self.run(*arguments)
        assert done.exit_code == code, done.output
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr.strip()

    def start(self, *arguments, **streams):
        """Starts a process."""
        command = [sys.executable, "-m", "torchobj", *map(str, arguments)]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams)

    def process(self, *arguments, **streams):
        """Runs a process to its end."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams
        process = self.start(*arguments, **streams)
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def on_terminal(self, *arguments, answer=None):
        """Runs a process on a terminal to its end; `answer` is typed when it asks.

        Returns:
            The exit code, and what the terminal received.
        """
        with self.terminal(*arguments) as (process, read):
            shown = b""
            while (block := read()) is not None:
                shown += block
                if answer is not None and b"[y/N]" in shown:
                    os.write(self._terminal, answer.encode())
                    answer = None
            return process.wait(LIMIT_S), shown.decode()

    @contextlib.contextmanager
    def terminal(self, *arguments):
        """A process on a terminal, and a function that reads what it writes: None at the end."""
        ours, theirs = pty.openpty()
        self._terminal = ours
        process = self.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        deadline = time.monotonic() + LIMIT_S

        def read():
            assert select.select([ours], [], [], deadline - time.monotonic())[0], "the command does not end"
            try:
                return os.read(ours, 65536) or None
            except OSError:
                # Linux reports the end of a terminal as EIO.
                return None

        try:
            yield process, read
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def _options(bucket):
    """Scheme and settings of a bucket, as a line of the configuration file."""
    if bucket.url.startswith("gs://"):
        return "gs", f'gcs = {{ endpoint_url = "{bucket.server.endpoint}" }}'
    s3 = bucket.config.s3
    return "s3", f's3 = {{ endpoint_url = "{s3.endpoint_url}", profile = "{s3.profile}" }}'
