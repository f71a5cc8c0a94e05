"""A strict server with boto3 or google-cloud-storage as the reference client. Our own is tested elsewhere.

What the tests of this package need of the server is part of `make test`; the others run where the server changes, and in
the long tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import boto_client
from tests.servers.gcs_client import gcs_client
from tests.strict.control import Control


@pytest.fixture(scope="session")
def server() -> Iterator[launch.Server]:
    with launch.start("strict") as started:
        yield started


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[launch.Server]:
    with launch.start("strict-gcs") as started:
        yield started


@pytest.fixture
def gcs_control(gcs_server: launch.Server) -> Control:
    assert gcs_server.control is not None
    control = Control(gcs_server.control)
    control.reset()
    control.bucket("bucket")
    return control


@pytest.fixture
def gcs(gcs_server: launch.Server, gcs_control: Control) -> Iterator[Any]:
    """A google-cloud-storage client."""
    del gcs_control  # It has reset the server and made the bucket.
    client = gcs_client(gcs_server)
    yield client
    client.close()
