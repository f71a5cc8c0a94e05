"""Fixtures of the checkpoint tests."""

import dataclasses
from unittest import mock

import pytest

from tests.support.disks import Tier
from tests.support.managers import Gate
from tests.support.saved_objects import planning
from torchobj import AdvancedOptions
from torchobj.checkpoint import CheckpointManager


@pytest.fixture
def config(bucket):
    return dataclasses.replace(bucket.config, part_bytes=5 << 20, advanced=AdvancedOptions(whole_below_bytes=5 << 20))


@pytest.fixture
def open_manager(bucket, config):
    def opened(**settings):
        return CheckpointManager(f"{bucket.url}/run", **({"config": config} | settings))

    return opened


@pytest.fixture
def manager(open_manager):
    return open_manager()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def tier(tmp_path, request):
    tier = Tier(f"memory://local-copies/{request.node.name}/run", tmp_path / "disk")
    yield tier
    for manager in tier.opened:
        manager.close()


@pytest.fixture(scope="module")
def planned():
    """Saves small states in the same way as large ones."""
    with mock.patch.object(planning, "_COPIED_BYTES", 0):
        yield
