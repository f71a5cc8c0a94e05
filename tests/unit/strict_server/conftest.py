"""A strict server per module, with boto3 as the reference client. Our own client is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import boto_client
from tests.servers.strict.control import Control


@pytest.fixture(scope="module")
def server() -> Iterator[launch.Server]:
    with launch.start("strict") as started:
        yield started


@pytest.fixture(scope="module")
def shared_client(server: launch.Server) -> Any:
    return boto_client(server)


@pytest.fixture
def control(server: launch.Server) -> Control:
    assert server.control is not None
    control = Control(server.control)
    control.reset()
    control.bucket("bucket")
    return control


@pytest.fixture
def s3(shared_client: Any, control: Control) -> Any:
    del control  # It has reset the server and made the bucket.
    return shared_client
