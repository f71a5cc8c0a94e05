"""The operations of `faults.py`, and checks of their bytes. `fault_cells` enforces deadlines.

An operation prepares once per server; `run` is timed, in its own process, under faults. Afterwards, without faults,
what was written is read back by plain HTTP.
"""

import concurrent.futures
import http.client
import io
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchobj
from benchmarks.lab.objects import MIB, pieces
from tests.servers.strict.control import Control, FaultRule
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
    folder: str = "clean"
    """The folder that only this cell writes to."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def written(self) -> str:
        return f"{self.url}/{self.folder}"

    def store(self) -> torchobj.Store:
        return torchobj.Store(self.url, config=self.config)

    def names(self) -> list[str]:
        return [f"{_SMALL}{number:05}" for number in range(self.objects)]

    def begin_faults(self, rules: Sequence[FaultRule]) -> None:
        control = Control(self.control)
        control.clear_requests()
        control.faults(*rules)

    def end_faults(self) -> None:
        Control(self.control).clear_faults()

    def delete_written(self) -> None:
        """Deletes what the cell wrote: the server keeps it in memory."""
        store = self.store()
        store.delete([info.key for info in store.list(f"{self.folder}/")])

    def body(self, key: str) -> bytes | None:
        """Returns the object that the server has under a key, or None."""
        where = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10.0)
        try:
            connection.request("GET", f"/{BUCKET}/{quote(key)}")
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        return None if response.status == 404 else content


def small_body(name: str) -> bytes:
    """Returns 2 to 34 KiB, different for each name."""
    number = int(name.rpartition("/")[2])
    return b"".join(pieces(number, 2048 + number * 7919 % 32768))


def _large_body() -> bytes:
    return b"".join(pieces(7, _LARGE_BYTES))


def prepare(location: Location) -> None:
    """Creates a bucket with public reads, and the objects to read."""
    control = Control(location.control)
    control.bucket(BUCKET, {"public": True})
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


def _same_state(found: Any, name: str, *seeds: int) -> None:
    for seed in seeds:
        expected = _state(seed)
        if found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected):
            return
    raise WrongBytesError(f"{name}: none of the states that were saved")


class Operation(ABC):
    """One column of the table."""

    name: str

    @abstractmethod
    def run(self, location: Location) -> None:
        """Runs the operation and compares what it reads."""

    def check(self, location: Location, *, succeeded: bool) -> None:
        """Compares what `run` wrote, after the faults ended."""
        del location, succeeded


class Get(Operation):
    name = "get"

    def run(self, location: Location) -> None:
        store = location.store()
        for name in location.names()[:8]:
            _same(store.get(name), name, small_body(name))
        _same(store.get(f"{_LARGE}0"), "the large object", _large_body())


class GetMany(Operation):
    name = "get_many"

    def run(self, location: Location) -> None:
        names = location.names()
        for name, found in zip(names, location.store().get_many(names), strict=True):
            _same(found, name, small_body(name))


def _name_and_bytes(reader: Any) -> tuple[str, bytes]:
    return reader.key, bytes(reader)


def _check_epoch(location: Location, loader: Any) -> None:
    seen = []
    for batch in loader:
        for name, found in batch:
            _same(found, name, small_body(name))
            seen.append(name)
    if sorted(seen) != location.names():
        raise WrongBytesError(f"{len(seen)} samples, {len(set(seen))} different, of {location.objects} objects")


class LoaderMap(Operation):
    name = "loader map"

    def run(self, location: Location) -> None:
        data = torchobj.S3MapDataset.from_prefix(
            f"{location.url}/{_SMALL}", s3client_config=location.config, transform=_name_and_bytes
        )
        _check_epoch(location, torchobj.DataLoader(data, batch_size=16, shuffle=True, num_workers=2, collate_fn=list))


class LoaderIterable(Operation):
    name = "loader iter"

    def run(self, location: Location) -> None:
        data = torchobj.S3IterableDataset.from_prefix(
            f"{location.url}/{_SMALL}", s3client_config=location.config, transform=_name_and_bytes, enable_sharding=True
        )
        _check_epoch(location, torchobj.DataLoader(data, batch_size=16, num_workers=2, collate_fn=list))


class List(Operation):
    name = "list"

    def run(self, location: Location) -> None:
        found = [(info.key, info.size) for info in location.store().list(_SMALL)]
        if found != [(name, len(small_body(name))) for name in location.names()]:
            raise WrongBytesError(f"a listing of {len(found)} keys, {len(set(found))} different, of {location.objects}")


class Save(Operation):
    name = "save"

    def run(self, location: Location) -> None:
        torchobj.save(_state(2), f"{location.written}/made.pt", config=location.config)

    def check(self, location: Location, *, succeeded: bool) -> None:
        content = location.body(f"{location.folder}/made.pt")
        if content is not None:
            _same_state(torch.load(io.BytesIO(content)), "made.pt", 2)
        elif succeeded:
            raise WrongBytesError("made.pt: not there, although save returned")


class Load(Operation):
    name = "load"

    def run(self, location: Location) -> None:
        _same_state(torchobj.load(f"{location.url}/saved.pt", config=location.config), "saved.pt", 1)


class Manager(Operation):
    name = "manager"

    def _open(self, location: Location) -> CheckpointManager:
        return CheckpointManager(f"{location.written}/run", keep_last=1, config=location.config)

    def run(self, location: Location) -> None:
        with self._open(location) as manager:
            manager.save(1, _state(1))
            manager.save(2, _state(2))
            _same_state(manager.restore(), "the latest step", 2)

    def check(self, location: Location, *, succeeded: bool) -> None:
        with self._open(location) as manager:
            for step in manager.steps():
                _same_state(manager.restore(step), f"step {step}", step)
            if succeeded and manager.steps() != [2]:
                raise WrongBytesError(f"steps {manager.steps()} after step 2 was saved with keep_last=1")


class Distributed(Operation):
    name = "DCP"

    def _load(self, location: Location) -> None:
        found = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
        dcp.load(found, storage_reader=StorageReader(f"{location.written}/dcp", config=location.config))
        _same_state(found, "the distributed checkpoint", 3)

    def run(self, location: Location) -> None:
        dcp.save(_state(3), storage_writer=StorageWriter(f"{location.written}/dcp", config=location.config))
        self._load(location)

    def check(self, location: Location, *, succeeded: bool) -> None:
        if succeeded or location.body(f"{location.folder}/dcp/.metadata") is not None:
            self._load(location)


OPERATIONS: dict[str, Operation] = {
    operation.name: operation()
    for operation in (Get, GetMany, LoaderMap, LoaderIterable, List, Save, Load, Manager, Distributed)
}


def _typed(error: BaseException) -> BaseException | None:
    """Returns torchobj's error that `error` is, or carries from another rank.

    torch replaces what a reader of metadata raises by an `AssertionError` with its text.
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, AssertionError) and "metadata read failed: get s3://" in str(error):
        return error
    return error if isinstance(error, torchobj.TorchobjError) else None


def attempt(operation: Operation, location: Location, rules: Sequence[FaultRule] = ()) -> dict[str, Any]:
    """Runs an operation under faults, checks its result without faults, and returns the fields of an `Outcome`."""
    warnings.simplefilter("ignore")
    location.begin_faults(rules)
    verdict, name, text = "ok", "", ""
    began_s = time.monotonic()
    try:
        operation.run(location)
    except WrongBytesError as error:
        verdict, name, text = "wrong", "", str(error)
    except (Exception, CheckpointException) as error:
        typed = _typed(error)
        verdict, name = ("untyped", type(error).__name__) if typed is None else ("error", type(typed).__name__)
        text = str(typed) if typed else traceback.format_exc()
    took_s = time.monotonic() - began_s
    location.end_faults()
    if verdict != "wrong":
        try:
            operation.check(location, succeeded=verdict == "ok")
        except (Exception, CheckpointException) as error:
            verdict, text = "wrong", f"left behind: {type(error).__name__}: {error} (it had ended with {name or 'ok'})"
    location.delete_written()
    return {"verdict": verdict, "name": name, "text": text, "took_s": took_s}
