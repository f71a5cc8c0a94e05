"""The command line with access to the bucket of a test."""

import pytest

from tests.support.command_line import CommandLine


@pytest.fixture
def cli(bucket, tmp_path, monkeypatch):
    """The command line with access to `bucket`."""
    return CommandLine(tmp_path, monkeypatch, bucket)
