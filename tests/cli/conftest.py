"""The command line with access to the bucket of a test, and files to transfer."""

import pytest

from tests.support.command_line import CommandLine
from torchobj.cli import transfer_run


@pytest.fixture
def cli(bucket, tmp_path, monkeypatch):
    """The command line with access to `bucket`."""
    return CommandLine(tmp_path, monkeypatch, bucket)


@pytest.fixture
def tree(tmp_path):
    """A folder of three files."""
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.bin", "b.txt", "sub/c.bin"):
        (folder / name).write_bytes(name.encode() * 100)
    return folder


@pytest.fixture
def synced(cli, bucket, tree):
    """URL of a copy of `tree`."""
    cli.lines("sync", tree, f"{bucket.url}/x")
    return f"{bucket.url}/x"


@pytest.fixture
def afterwards(monkeypatch):
    """Has a function called when all transfers of a command are done, before their copies are verified."""
    run_all = transfer_run.run_all

    def call(function):
        def run(*arguments):
            outcome = run_all(*arguments)
            function()
            return outcome

        monkeypatch.setattr(transfer_run, "run_all", run)

    return call
