"""The operations of `faults.py` and `soak.py`, and checks of their bytes.

A server is prepared once; an operation is timed under faults. Afterwards, without faults, what was written is read back
by plain HTTP.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import io
import itertools
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchobj
from benchmarks.harness.fault_kinds import Script
from benchmarks.lab.objects import MIB, pieces
from tests.servers import launch
from tests.strict.control import Control
from tests.support.credential_providers import FixedToken
from torchobj import GCSOptions, S3Options, StoreConfig
from torchobj.checkpoint import CheckpointManager, StorageReader, StorageWriter

BUCKET = "faults"
_SMALL, _LARGE = "small/", "large/"
_LARGE_BYTES = 12 * MIB
_PAGES = 4
_PUTS_AT_ONCE = 16


class WrongBytesError(Exception):
    """A read returned, or a write left, wrong bytes."""


@dataclass(frozen=True)
class Location:
    """A server's bucket, its configuration, and the objects in it."""

    endpoint: str
    control: str
    config: torchobj.StoreConfig
    objects: int
    scheme: str = "s3"
    token: str | None = None
    """The token that the server of GCS accepts."""
    folder: str = "clean"
    """The folder that only this cell writes to."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{BUCKET}"

    @property
    def written(self) -> str:
        return f"{self.url}/{self.folder}"

    def store(self) -> torchobj.Store:
        return torchobj.Store(self.url, config=self.config)

    def names(self) -> list[str]:
        return [f"{_SMALL}{number:05}" for number in range(self.objects)]

    def body(self, key: str) -> bytes | None:
        """Returns the object that the server has under a key, or None."""
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=10.0)
        with contextlib.closing(connection):
            path = (
                f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}?alt=media" if self.token else f"/{BUCKET}/{quote(key)}"
            )
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"} if self.token else {})
            response = connection.getresponse()
            content = response.read()
            return None if response.status == 404 else content


@contextlib.contextmanager
def served(scheme: str, objects: int) -> Iterator[Location]:
    """Starts the strict server of a provider, with public reads or its token in the location."""
    with launch.start("strict" if scheme == "s3" else "strict-gcs") as server:
        assert server.control is not None, "the strict servers have one"
        os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        gcs = GCSOptions(endpoint_url=server.endpoint, credential_provider=FixedToken(server.token or ""))
        config = StoreConfig(s3=S3Options(endpoint_url=server.endpoint, region=server.region), gcs=gcs)
        yield Location(server.endpoint, server.control, config, objects, scheme, server.token)


def small_body(name: str) -> bytes:
    """Returns 2 to 34 KiB, different for each name."""
    number = int(name.rpartition("/")[2])
    return b"".join(pieces(number, 2048 + number * 7919 % 32768))


def _large_body() -> bytes:
    return b"".join(pieces(7, _LARGE_BYTES))


def prepare(location: Location) -> None:
    """Creates a bucket with public reads, and the objects to read."""
    control = Control(location.control)
    control.bucket(BUCKET, {} if location.token else {"public": True})
    # Makes listings have several pages.
    control.limits(max_keys=max(1, location.objects // _PAGES))
    store = location.store()
    with concurrent.futures.ThreadPoolExecutor(_PUTS_AT_ONCE) as pool:
        list(pool.map(lambda name: store.put(name, small_body(name)), location.names()))
    store.put(f"{_LARGE}0", _large_body())
    torchobj.save(_state(1), f"{location.url}/saved.pt", config=location.config)


def _same(found: Any, name: str, expected: bytes) -> None:
    if bytes(found) != expected:
        raise WrongBytesError(f"{name}: {len(bytes(found))} bytes, expected {len(expected)}")


def _state(seed: int) -> dict[str, Any]:
    """A state larger than two parts, with a small tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randint(0, 256, (_LARGE_BYTES,), dtype=torch.uint8, generator=generator),
        "bias": torch.randn(100, generator=generator),
        "step": torch.tensor(seed),
    }


def _same_state(found: Any, name: str, seed: int) -> None:
    expected = _state(seed)
    if found.keys() != expected.keys() or not all(torch.equal(found[key], expected[key]) for key in expected):
        raise WrongBytesError(f"{name}: not the state that was saved")


@dataclass(frozen=True)
class Operation:
    """One column of the table."""

    run: Callable[[Location], None]
    """Runs the operation and compares what it reads."""
    check: Callable[[Location, bool], None] | None = None
    """Compares what `run` wrote, after the faults ended."""


def _get(location: Location) -> None:
    store = location.store()
    for name in location.names()[:8]:
        _same(store.get(name), name, small_body(name))
    _same(store.get(f"{_LARGE}0"), "the large object", _large_body())


def _get_many(location: Location) -> None:
    names = location.names()
    for name, found in zip(names, location.store().get_many(names), strict=True):
        _same(found, name, small_body(name))


def name_and_bytes(reader: Any) -> tuple[str, bytes]:
    return reader.key, bytes(reader)


def epoch(
    location: Location, kind: Any = torchobj.ObjectMapDataset, transform: Any = name_and_bytes, **order: Any
) -> torchobj.DataLoader[Any]:
    """A loader of the names and bytes of the small objects."""
    dataset = kind(f"{location.url}/{_SMALL}", config=location.config, transform=transform)
    return torchobj.DataLoader(dataset, batch_size=16, num_workers=2, collate_fn=list, **order)


def checked(batch: list[tuple[str, bytes]]) -> list[str]:
    """The names of a batch, whose bytes are compared."""
    for name, found in batch:
        _same(found, name, small_body(name))
    return [name for name, _ in batch]


def check_names(location: Location, batches: Iterable[list[str]]) -> None:
    """Raises an error unless each small object is in the batches once."""
    seen = list(itertools.chain.from_iterable(batches))
    if sorted(seen) != location.names():
        raise WrongBytesError(f"{len(seen)} samples, {len(set(seen))} different, of {location.objects} objects")


def _loader_map(location: Location) -> None:
    check_names(location, map(checked, epoch(location, shuffle=True)))


def _loader_iterable(location: Location) -> None:
    iterable = functools.partial(torchobj.ObjectIterableDataset, enable_sharding=True)
    check_names(location, map(checked, epoch(location, iterable)))


def _list(location: Location) -> None:
    found = [(info.key, info.size) for info in location.store().list(_SMALL)]
    if found != [(name, len(small_body(name))) for name in location.names()]:
        raise WrongBytesError(f"a listing of {len(found)} keys, {len(set(found))} different, of {location.objects}")


def _save(location: Location) -> None:
    torchobj.save(_state(2), f"{location.written}/made.pt", config=location.config)


def _check_saved(location: Location, succeeded: bool) -> None:
    content = location.body(f"{location.folder}/made.pt")
    if content is not None:
        _same_state(torch.load(io.BytesIO(content)), "made.pt", 2)
    elif succeeded:
        raise WrongBytesError("made.pt: not there, although save returned")


def _load(location: Location) -> None:
    _same_state(torchobj.load(f"{location.url}/saved.pt", config=location.config), "saved.pt", 1)


def _manager(location: Location) -> CheckpointManager:
    return CheckpointManager(f"{location.written}/run", keep_last=1, config=location.config)


def _manage(location: Location) -> None:
    with _manager(location) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
        _same_state(manager.restore(), "the latest step", 2)


def _check_managed(location: Location, succeeded: bool) -> None:
    with _manager(location) as manager:
        for step in manager.steps():
            _same_state(manager.restore(step), f"step {step}", step)
        if succeeded and manager.steps() != [2]:
            raise WrongBytesError(f"steps {manager.steps()} after step 2 was saved with keep_last=1")


def _load_distributed(location: Location) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
    dcp.load(found, storage_reader=StorageReader(f"{location.written}/dcp", config=location.config))
    _same_state(found, "the distributed checkpoint", 3)


def _save_distributed(location: Location) -> None:
    dcp.save(_state(3), storage_writer=StorageWriter(f"{location.written}/dcp", config=location.config))
    _load_distributed(location)


def _check_distributed(location: Location, succeeded: bool) -> None:
    if succeeded or location.body(f"{location.folder}/dcp/.metadata") is not None:
        _load_distributed(location)


OPERATIONS = {
    "get": Operation(_get),
    "get_many": Operation(_get_many),
    "loader map": Operation(_loader_map),
    "loader iter": Operation(_loader_iterable),
    "list": Operation(_list),
    "save": Operation(_save, _check_saved),
    "load": Operation(_load),
    "manager": Operation(_manage, _check_managed),
    "DCP": Operation(_save_distributed, _check_distributed),
}


def _typed(error: BaseException) -> BaseException | None:
    """Returns torchobj's error that `error` is, or carries from another rank.

    torch replaces what a reader of metadata raises by an `AssertionError` with its text.
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, AssertionError) and "metadata read failed: get " in str(error):
        return error
    return error if isinstance(error, torchobj.TorchobjError) else None


@dataclass(frozen=True)
class Outcome:
    """How an operation ended."""

    verdict: str
    """`ok`, `error` (one of torchobj's), `untyped`, `wrong`, `late` or `died`."""
    name: str = ""
    """The class of the error."""
    text: str = ""
    took_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict not in ("ok", "error")

    def word(self) -> str:
        """Returns the text in the table."""
        words = {"wrong": "WRONG BYTES", "late": "HANG", "died": "DIED", "untyped": f"UNTYPED {self.name}"}
        word = self.name.removesuffix("Error") if self.verdict == "error" else words.get(self.verdict, "ok")
        return word if self.verdict == "late" else f"{word} {self.took_s:.1f}"


def attempt(name: str, location: Location, script: Script) -> Outcome:
    """Runs an operation under faults, and checks its result without faults."""
    warnings.simplefilter("ignore")
    control = Control(location.control)
    control.clear_requests()
    control.faults(*script.rules(location.endpoint))
    verdict, error_name, text = "ok", "", ""
    began_s = time.monotonic()
    try:
        OPERATIONS[name].run(location)
    except WrongBytesError as error:
        verdict, text = "wrong", str(error)
    except (Exception, CheckpointException) as error:
        typed = _typed(error)
        verdict, error_name = ("untyped", type(error).__name__) if typed is None else ("error", type(typed).__name__)
        text = str(typed) if typed else traceback.format_exc()
    took_s = time.monotonic() - began_s
    control.clear_faults()
    check = OPERATIONS[name].check
    if verdict != "wrong" and check is not None:
        try:
            check(location, verdict == "ok")
        except (Exception, CheckpointException) as error:
            ended = f"it had ended with {error_name or 'ok'}"
            verdict, text = "wrong", f"left behind: {type(error).__name__}: {error} ({ended})"
    # The server keeps it in memory.
    store = location.store()
    store.delete([info.key for info in store.list(f"{location.folder}/")])
    return Outcome(verdict, error_name, text, took_s)
