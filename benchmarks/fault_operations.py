"""The operations of `faults`, and whether their bytes are right. Leaves deadlines to `fault_cells`.

An operation prepares once for each server; `run` is what is timed, in a process of its own, under faults. What was
written is read back afterwards, when there are none, by plain HTTP.
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
    """What was read, or what a write left, is not what it should be."""


@dataclass(frozen=True)
class Place:
    """A server's bucket, how it is used, and the objects in it."""

    endpoint: str
    control: str
    config: torchobj.StoreConfig
    objects: int
    folder: str = "clean"
    """Where a cell writes: no other writes there."""

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
        control.forget_requests()
        control.faults(*rules)

    def end_faults(self) -> None:
        Control(self.control).clear_faults()

    def forget_written(self) -> None:
        """Deletes what the cell left: the server keeps it in memory."""
        store = self.store()
        store.delete([info.key for info in store.list(f"{self.folder}/")])

    def body(self, key: str) -> bytes | None:
        """What the server has under a key; None where there is nothing."""
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
    """2 to 34 KiB, other for each name."""
    number = int(name.rpartition("/")[2])
    return b"".join(pieces(number, 2048 + number * 7919 % 32768))


def _large_body() -> bytes:
    return b"".join(pieces(7, _LARGE_BYTES))


def prepare(place: Place) -> None:
    """Makes the bucket, which anybody may read, and the objects that are read."""
    control = Control(place.control)
    control.bucket(BUCKET, {"public": True})
    # So that listings have several pages.
    control.limits(max_keys=max(1, place.objects // _PAGES))
    store = place.store()
    with concurrent.futures.ThreadPoolExecutor(_PUTS_AT_ONCE) as pool:
        list(pool.map(lambda name: store.put(name, small_body(name)), place.names()))
    store.put(f"{_LARGE}0", _large_body())
    torchobj.save(_state(1), f"{place.url}/saved.pt", config=place.config)


def _same(found: Any, name: str, expected: bytes) -> None:
    if bytes(found) != expected:
        raise WrongBytesError(f"{name}: {len(bytes(found))} bytes, expected {len(expected)}")


def _state(seed: int) -> dict[str, Any]:
    """Larger than two parts, and something small beside."""
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
    def run(self, place: Place) -> None:
        """Does it, and compares what it reads."""

    def check(self, place: Place, *, succeeded: bool) -> None:
        """Compares what `run` left behind, when there are no faults any more."""
        del place, succeeded


class Get(Operation):
    name = "get"

    def run(self, place: Place) -> None:
        store = place.store()
        for name in place.names()[:8]:
            _same(store.get(name), name, small_body(name))
        _same(store.get(f"{_LARGE}0"), "the large object", _large_body())


class GetMany(Operation):
    name = "get_many"

    def run(self, place: Place) -> None:
        names = place.names()
        for name, found in zip(names, place.store().get_many(names), strict=True):
            _same(found, name, small_body(name))


def _name_and_bytes(reader: Any) -> tuple[str, bytes]:
    return reader.key, bytes(reader)


def _check_epoch(place: Place, loader: Any) -> None:
    seen = []
    for batch in loader:
        for name, found in batch:
            _same(found, name, small_body(name))
            seen.append(name)
    if sorted(seen) != place.names():
        raise WrongBytesError(f"{len(seen)} samples, {len(set(seen))} different, of {place.objects} objects")


class LoaderMap(Operation):
    name = "loader map"

    def run(self, place: Place) -> None:
        data = torchobj.S3MapDataset.from_prefix(
            f"{place.url}/{_SMALL}", s3client_config=place.config, transform=_name_and_bytes
        )
        _check_epoch(place, torchobj.DataLoader(data, batch_size=16, shuffle=True, num_workers=2, collate_fn=list))


class LoaderIterable(Operation):
    name = "loader iter"

    def run(self, place: Place) -> None:
        data = torchobj.S3IterableDataset.from_prefix(
            f"{place.url}/{_SMALL}", s3client_config=place.config, transform=_name_and_bytes, enable_sharding=True
        )
        _check_epoch(place, torchobj.DataLoader(data, batch_size=16, num_workers=2, collate_fn=list))


class List(Operation):
    name = "list"

    def run(self, place: Place) -> None:
        found = [(info.key, info.size) for info in place.store().list(_SMALL)]
        if found != [(name, len(small_body(name))) for name in place.names()]:
            raise WrongBytesError(f"a listing of {len(found)} keys, {len(set(found))} different, of {place.objects}")


class Save(Operation):
    name = "save"

    def run(self, place: Place) -> None:
        torchobj.save(_state(2), f"{place.written}/made.pt", config=place.config)

    def check(self, place: Place, *, succeeded: bool) -> None:
        content = place.body(f"{place.folder}/made.pt")
        if content is not None:
            _same_state(torch.load(io.BytesIO(content)), "made.pt", 2)
        elif succeeded:
            raise WrongBytesError("made.pt: not there, although save returned")


class Load(Operation):
    name = "load"

    def run(self, place: Place) -> None:
        _same_state(torchobj.load(f"{place.url}/saved.pt", config=place.config), "saved.pt", 1)


class Manager(Operation):
    name = "manager"

    def _open(self, place: Place) -> CheckpointManager:
        return CheckpointManager(f"{place.written}/run", keep_last=1, config=place.config)

    def run(self, place: Place) -> None:
        with self._open(place) as manager:
            manager.save(1, _state(1))
            manager.save(2, _state(2))
            _same_state(manager.restore(), "the latest step", 2)

    def check(self, place: Place, *, succeeded: bool) -> None:
        with self._open(place) as manager:
            for step in manager.steps():
                _same_state(manager.restore(step), f"step {step}", step)
            if succeeded and manager.steps() != [2]:
                raise WrongBytesError(f"steps {manager.steps()} after step 2 was saved with keep_last=1")


class Distributed(Operation):
    name = "DCP"

    def _load(self, place: Place) -> None:
        found = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
        dcp.load(found, storage_reader=StorageReader(f"{place.written}/dcp", config=place.config))
        _same_state(found, "the distributed checkpoint", 3)

    def run(self, place: Place) -> None:
        dcp.save(_state(3), storage_writer=StorageWriter(f"{place.written}/dcp", config=place.config))
        self._load(place)

    def check(self, place: Place, *, succeeded: bool) -> None:
        if succeeded or place.body(f"{place.folder}/dcp/.metadata") is not None:
            self._load(place)


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Get(),
        GetMany(),
        LoaderMap(),
        LoaderIterable(),
        List(),
        Save(),
        Load(),
        Manager(),
        Distributed(),
    )
}


def _typed(error: BaseException) -> BaseException | None:
    """The error of torchobj that `error` is, or carries from another rank.

    torch replaces what a reader of metadata raises by an `AssertionError` with its text.
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, AssertionError) and "metadata read failed: get s3://" in str(error):
        return error
    return error if isinstance(error, torchobj.TorchobjError) else None


def attempt(operation: Operation, place: Place, rules: Sequence[FaultRule] = ()) -> dict[str, Any]:
    """Runs an operation under faults and checks what it left, without: the fields of an `Outcome`."""
    warnings.simplefilter("ignore")
    place.begin_faults(rules)
    verdict, name, text = "ok", "", ""
    began_s = time.monotonic()
    try:
        operation.run(place)
    except WrongBytesError as error:
        verdict, name, text = "wrong", "", str(error)
    except (Exception, CheckpointException) as error:
        typed = _typed(error)
        verdict, name = ("untyped", type(error).__name__) if typed is None else ("error", type(typed).__name__)
        text = str(typed) if typed else traceback.format_exc()
    took_s = time.monotonic() - began_s
    place.end_faults()
    if verdict != "wrong":
        try:
            operation.check(place, succeeded=verdict == "ok")
        except (Exception, CheckpointException) as error:
            verdict, text = "wrong", f"left behind: {type(error).__name__}: {error} (it had ended with {name or 'ok'})"
    place.forget_written()
    return {"verdict": verdict, "name": name, "text": text, "took_s": took_s}
