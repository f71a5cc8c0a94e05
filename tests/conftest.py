"""Servers, buckets and configurations for the tests. A server starts once per process; each test has its own bucket."""

import fcntl
import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]

from tests.servers import launch
from tests.strict.control import Control
from tests.support import huge_pages, warm_python
from tests.support.buckets import AnyBucket, Bucket, GcsBucket, new_gcs_bucket, new_s3_bucket
from tests.support.gcs_control import S3NamedControl
from tests.tools import CACHE
from torchobj.fsspec import instances

_numbers = itertools.count(1)

# A shell that starts the tests with `&` makes their processes ignore Ctrl-C, and `nohup` a closed terminal; some tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# On a busy machine an example may take any time. `make test` has the same examples in each run, `make matrix` new ones.
_profile = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("random", _profile)
hypothesis.settings.register_profile("tests", _profile, derandomize=True)
hypothesis.settings.load_profile("tests")

OLD_TORCH = "torch==2.6.0"


#: Fixtures that start a server.
SERVED = frozenset(
    [
        "strict_server",
        "moto_server",
        "versitygw_server",
        "strict_gcs_server",
        "fake_gcs_server",
        "gcs_bucket",
        "fake_gcs_bucket",
        "bucket",
        "other_bucket",
        "versitygw_bucket",
        "any_bucket",
        "control",
        "gcs_control",
        "gcs_server",
        "place",
        "server",
    ]
)
#: Few and long: with these first, no process ends long before another.
FIRST = ("docs", "loader", "workers", "checkpoint", "datasets", "frameworks", "s3torchconnector", "benchmarks")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "providers(*schemes): runs a test with `bucket` for these of s3 and gs")
    config.addinivalue_line("markers", "unit: starts no server and no process; set below")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Says how a process that runs tests ended: a signal leaves no other trace."""
    if error is not None:
        print(f"\n{node.gateway.id}: {error}; exit code {node.gateway._io.wait()}", file=sys.stderr)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        """A file is run by one process, and so are the files of a group."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            return group_of(config.rootpath / file) or file

        def _reschedule(self, node: Any) -> None:
            """Also shuts a process down that received the last unit: it runs its last test only after it was told what
            follows. xdist omits this after a crash, and the run hangs.
            """
            super()._reschedule(node)
            if not self.workqueue:
                node.shutdown()

        def remove_node(self, node: Any) -> str | None:
            """Returns the test that crashed a process; xdist would run it again, in each process that it starts."""
            units = self.assigned_work.pop(node)
            left = [(unit, test) for unit in units.values() for test, is_completed in unit.items() if not is_completed]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    config.option.loadscopereorder = False
    return Files(config, log)


@functools.cache
def group_of(file: Path) -> str:
    """The `xdist_group` in the `pytestmark` of a file: that of a test is not in its name since pytest 9.2."""
    found = re.search(r'xdist_group\("(\w+)"\)', file.read_text())
    return found[1] if found else ""


@functools.cache
def starts_workers(file: Path) -> bool:
    """Whether tests of a file start workers of a loader, or servers of their own."""
    return bool(re.search(r"num_workers|multiprocessing|warm_python|launch\.start", file.read_text()))


def is_unit(item: pytest.Item) -> bool:
    """Whether a test starts no server, no process and no other framework."""
    if item.path.parent.name in ("benchmarks", "frameworks", "s3torchconnector"):
        return False
    code = getattr(item, "function", is_unit).__code__
    served = SERVED & set(getattr(item, "fixturenames", ()))
    return not served and "subprocess" not in code.co_names and not starts_workers(item.path)


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Archives contain the time, which may differ between the processes of a run: they would have other tests."""
    return f"{len(val)} bytes" if isinstance(val, bytes) and len(val) > 20 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return not group_of(item.path), FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=order)
    for item in items:
        if is_unit(item) and not item.get_closest_marker("matrix"):
            item.add_marker("unit")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("providers")
    if marker is not None and "storage_provider" in metafunc.fixturenames:
        metafunc.parametrize("storage_provider", marker.args)


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    # The collected tests live until the end: the collector need not search them again, nor copy their pages in forked workers.
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def cheap_forks() -> None:
    """Many tests fork: workers of loaders, and ranks."""
    huge_pages.collapse()


@pytest.fixture(autouse=True)
def default_of_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of `torchobj.fsspec.register` ends with its test; plugins of Lightning call it too."""
    monkeypatch.setattr(instances, "_default", None)


@pytest.fixture
def fsspec_registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """fsspec's registry without torchobj, restored afterwards."""
    for name in ("s3", "gs", "gcs", "tobj+s3", "tobj+gs"):
        monkeypatch.setitem(_registry, name, None)
        monkeypatch.delitem(_registry, name)
    return cast("dict[str, Any]", _registry)


@pytest.fixture(scope="session", autouse=True)
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, launch.Server], None]:
    """Writes the servers' credentials to a profile file and hides the machine's own settings of AWS and Google."""
    file = tmp_path_factory.mktemp("aws") / "credentials"
    file.touch()
    google = ("GOOGLE_", "CLOUDSDK_", "GCE_METADATA_", "STORAGE_EMULATOR_HOST")
    for name in [name for name in os.environ if name.startswith(("AWS_", *google))]:
        del os.environ[name]
    os.environ |= {
        "AWS_SHARED_CREDENTIALS_FILE": str(file),
        "AWS_CONFIG_FILE": str(file.with_name("config")),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUDSDK_CONFIG": str(file.with_name("gcloud")),
    }

    warm_python.start()

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


@pytest.fixture(scope="session")
def strict_gcs_server() -> Iterator[launch.Server]:
    with launch.start("strict-gcs") as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs_server() -> Iterator[launch.Server]:
    with launch.start("fake-gcs-server") as server:
        yield server


def _new_name() -> str:
    return f"test-{next(_numbers)}"


@pytest.fixture
def storage_provider() -> str:
    """The scheme of `bucket`. `pytest.mark.providers("s3", "gs")` runs a test once for each."""
    return "s3"


@pytest.fixture
def gcs_bucket(strict_gcs_server: launch.Server) -> GcsBucket:
    """An empty bucket of the strict GCS server."""
    return new_gcs_bucket(_new_name(), strict_gcs_server)


@pytest.fixture(params=[True, False], ids=["parts", "resumable"])
def fake_gcs_bucket(request: pytest.FixtureRequest, fake_gcs_server: launch.Server) -> GcsBucket:
    """An empty bucket of fake-gcs-server, with each kind of upload."""
    return new_gcs_bucket(_new_name(), fake_gcs_server, parallel_upload=request.param)


def strict_bucket(storage_provider: str, request: pytest.FixtureRequest) -> AnyBucket:
    """Creates a bucket of the strict server of a provider."""
    if storage_provider == "gs":
        return cast("AnyBucket", new_gcs_bucket(_new_name(), request.getfixturevalue("strict_gcs_server")))
    return cast("AnyBucket", new_s3_bucket(_new_name(), "strict", request.getfixturevalue("strict_server")))


@pytest.fixture
def bucket(storage_provider: str, request: pytest.FixtureRequest) -> AnyBucket:
    """An empty bucket of the strict server."""
    return strict_bucket(storage_provider, request)


@pytest.fixture
def other_bucket(storage_provider: str, request: pytest.FixtureRequest) -> AnyBucket:
    """Another bucket of the same server."""
    return strict_bucket(storage_provider, request)


@pytest.fixture
def versitygw_bucket(versitygw_server: launch.Server) -> Bucket:
    """An empty bucket of versitygw."""
    return new_s3_bucket(_new_name(), "versitygw", versitygw_server)


#: Servers of other programs, which check less than ours: tests that they all pass are part of the long tables.
OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("moto", "versitygw", "fake-gcs-server")]


@pytest.fixture(params=["strict", "strict-gcs", *OTHERS])
def any_bucket(request: pytest.FixtureRequest) -> AnyBucket:
    """An empty bucket, once on each server."""
    server = request.getfixturevalue(request.param.replace("-", "_").removesuffix("_server") + "_server")
    if "gcs" in request.param:
        return new_gcs_bucket(_new_name(), server, parallel_upload=request.param == "strict-gcs")
    return new_s3_bucket(_new_name(), request.param, server)


@pytest.fixture
def control(storage_provider: str, request: pytest.FixtureRequest) -> Iterator[Control]:
    """A control client of the strict server of `bucket`, with no faults and an empty request log."""
    is_gcs = storage_provider == "gs"
    server = request.getfixturevalue("strict_gcs_server" if is_gcs else "strict_server")
    client = (S3NamedControl if is_gcs else Control)(server.control)
    client.clear_faults()
    client.clear_requests()
    yield client
    client.clear_faults()
    client.clock(0)


@pytest.fixture
def gcs_control(strict_gcs_server: launch.Server) -> Iterator[Control]:
    """A control client of the strict GCS server, whose limits and tokens are restored after the test."""
    client = Control(str(strict_gcs_server.control))
    limits = client.limits()
    client.clear_requests()
    yield client
    client.clear_faults()
    client.clear_tokens()
    client.clock(0)
    client.limits(**limits)


@pytest.fixture(scope="session")
def old_python() -> str:
    """Returns a Python with the oldest supported torch: TORCHOBJ_OLD_PYTHON, or one that is kept in the cache."""
    if "TORCHOBJ_OLD_PYTHON" in os.environ:
        return os.environ["TORCHOBJ_OLD_PYTHON"]
    folder = CACHE / "old-torch"
    python = str(folder / "bin" / "python")
    with open(CACHE / "old-torch.lock", "w") as lock:
        # Several processes of a run may ask for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", OLD_TORCH, "numpy", "pytest"], check=True)
            (folder / "ready").touch()
    return python
