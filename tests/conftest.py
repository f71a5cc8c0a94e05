"""Servers, buckets and configurations for the tests. A server starts once per session; each test has its own bucket."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.servers import launch
from tests.servers.boto_client import boto_client
from tests.servers.strict.control import Control
from tests.tools import CACHE
from torchobj import S3Options, StoreConfig

_numbers = itertools.count(1)

# A shell that starts the tests with `&` makes their processes ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

OLD_TORCH = "torch==2.6.0"


class Bucket(NamedTuple):
    """A bucket of a test server."""

    name: str
    config: StoreConfig
    server: launch.Server
    boto: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def body(self, key: str) -> bytes:
        """Returns an object's content, read by boto3."""
        return self.boto.get_object(Bucket=self.name, Key=key)["Body"].read()

    def keys(self) -> list[str]:
        return [item["Key"] for item in self.boto.list_objects_v2(Bucket=self.name).get("Contents", [])]

    def uploads(self) -> list[Any]:
        return self.boto.list_multipart_uploads(Bucket=self.name).get("Uploads", [])


@pytest.fixture(scope="session", autouse=True)
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, launch.Server], None]:
    """Writes the servers' credentials to a profile file and hides the machine's own AWS settings."""
    file = tmp_path_factory.mktemp("aws") / "credentials"
    file.touch()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_SHARED_CREDENTIALS_FILE": str(file),
        "AWS_CONFIG_FILE": str(file.with_name("config")),
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def add(profile: str, server: launch.Server) -> None:
        entry = f"[{profile}]\naws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
        with file.open("a") as out:
            out.write(entry)

    return add


def _server(kind: str) -> Any:
    @pytest.fixture(scope="session", name=f"{kind}_server")
    def started(credentials: Callable[[str, launch.Server], None]) -> Iterator[launch.Server]:
        with launch.start(kind) as server:
            credentials(kind, server)
            yield server

    return started


strict_server = _server("strict")
moto_server = _server("moto")
versitygw_server = _server("versitygw")


def _new_bucket(kind: str, server: launch.Server) -> Bucket:
    name = f"test-{next(_numbers)}"
    boto = boto_client(server)
    boto.create_bucket(Bucket=name)
    config = StoreConfig(s3=S3Options(endpoint_url=server.endpoint, profile=kind))
    return Bucket(name, config, server, boto)


@pytest.fixture
def bucket(strict_server: launch.Server) -> Bucket:
    """An empty bucket of the strict server."""
    return _new_bucket("strict", strict_server)


@pytest.fixture(params=["strict", "moto", "versitygw"])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket, once on each server."""
    return _new_bucket(request.param, request.getfixturevalue(f"{request.param}_server"))


@pytest.fixture
def control(strict_server: launch.Server) -> Iterator[Control]:
    """A control client of the strict server, with no faults and an empty request log."""
    client = Control(strict_server.control)
    client.clear_faults()
    client.clear_requests()
    yield client
    client.clear_faults()
    client.clock(0)


@pytest.fixture(scope="session")
def old_python() -> str:
    """Returns a Python with the oldest supported torch: TORCHOBJ_OLD_PYTHON, or one that is kept in the cache."""
    if "TORCHOBJ_OLD_PYTHON" in os.environ:
        return os.environ["TORCHOBJ_OLD_PYTHON"]
    folder = CACHE / "old-torch"
    python = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", OLD_TORCH, "numpy", "pytest"], check=True)
        (folder / "ready").touch()
    return python
