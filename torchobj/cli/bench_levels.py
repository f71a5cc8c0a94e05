"""Measures what a prefix gives at a number of concurrent requests: objects and bytes per second, latency, CPU."""

import collections
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence

from torchobj._torchobj import ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.explicit_fields import replace_fields
from torchobj.exceptions import StoreError
from torchobj.store import Store

__all__ = ["Level", "measure"]

#: Threads that call `get_many`, so that one batch starts while another ends.
_READERS = 2
#: Threads that time single reads while the readers run.
_PROBES = 2
#: Maximum size of the batches in memory.
_BATCH_BYTES = 128 << 20
_MAX_BATCH_OBJECTS = 4096
#: Maximum number of concurrent requests of the timed reads; no level leaves this number to the readers.
_OTHER = 4096


@dataclasses.dataclass(frozen=True)
class Level:
    """The result of one number of concurrent requests."""

    concurrency: int
    seconds: float
    objects: int
    bytes: int
    cpu_s: float
    """CPU time of this process."""
    latencies_s: Sequence[float]
    """Durations of single reads of whole objects, ascending."""
    errors: dict[str, int]
    """Failed reads by the type of their error."""

    @property
    def objects_per_s(self) -> float:
        """Objects per second."""
        return self.objects / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    def latency_s(self, share: float) -> float | None:
        """A percentile of the latency, as a share of 0..1; None without measurements."""
        count = len(self.latencies_s)
        return self.latencies_s[min(count - 1, int(share * count))] if count else None


class _Run:
    """The threads of one level, which read objects in random order until the time has elapsed."""

    def __init__(self, objects: Sequence[ObjectRef], batch: int, seconds: float) -> None:
        self._batches = _batches(objects, batch)
        self._lock = threading.Lock()
        self._end = time.monotonic() + seconds
        self.objects, self.bytes = 0, 0
        self.latencies: list[float] = []
        self.errors: collections.Counter[str] = collections.Counter()

    def _batches_of_a_thread(self) -> Iterator[list[ObjectRef]]:
        """Batches until the time has elapsed, at least one."""
        while True:
            with self._lock:
                batch = next(self._batches)
            yield batch
            if time.monotonic() >= self._end:
                return

    def read(self, store: Store) -> None:
        """Reads batches."""
        for batch in self._batches_of_a_thread():
            results = store.get_many(batch, return_errors=True)
            failed = [result for result in results if isinstance(result, Exception)]
            size = sum(len(result) for result in results if not isinstance(result, (Exception, int)))
            with self._lock:
                self.objects += len(results) - len(failed)
                self.bytes += size
                self.errors.update(type(error).__name__ for error in failed)

    def probe(self, store: Store) -> None:
        """Times single reads."""
        for batch in self._batches_of_a_thread():
            for ref in batch:
                started = time.perf_counter()
                try:
                    size = len(store.get_many([ref])[0])
                except StoreError as error:
                    with self._lock:
                        self.errors[type(error).__name__] += 1
                else:
                    with self._lock:
                        self.latencies.append(time.perf_counter() - started)
                        self.objects, self.bytes = self.objects + 1, self.bytes + size
                if time.monotonic() >= self._end:
                    return


def _batches(objects: Sequence[ObjectRef], size: int) -> Iterator[list[ObjectRef]]:
    """Batches without an end, in another order in each round."""
    order, rng = list(objects), random.Random(0)  # noqa: S311  an order of reads

    def endless() -> Iterator[ObjectRef]:
        while True:
            rng.shuffle(order)
            yield from order

    source = endless()
    while True:
        yield list(itertools.islice(source, size))


def measure(url: str, objects: Sequence[ObjectRef], config: StoreConfig, concurrency: int, seconds: float) -> Level:
    """Reads objects of the store at `url` in random order, as a loader does.

    Args:
        url: URL of the store.
        objects: The objects, with their sizes.
        config: Configuration of the store; `max_in_flight` is replaced.
        concurrency: Number of concurrent requests, of which up to two are timed.
        seconds: Time after which no more reads are started. Each thread makes at least one.
    """
    mean = max(1, sum(ref.size or 0 for ref in objects) // len(objects))
    batch = max(1, min(4 * concurrency, _MAX_BATCH_OBJECTS, _BATCH_BYTES // mean))
    run = _Run(objects, batch, seconds)
    timed = min(_PROBES, concurrency)
    threads = []
    # Another configuration has permits of its own: timed reads do not wait for those of the readers.
    for work, number, count in ((run.probe, _OTHER, timed), (run.read, concurrency - timed, _READERS)):
        if number > 0:
            store = Store(url, config=replace_fields(config, max_in_flight=number))
            threads += [threading.Thread(target=work, args=(store,), daemon=True) for _ in range(count)]
    started, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        # With a timeout, so that Ctrl-C is handled at once.
        while thread.is_alive():
            thread.join(0.1)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Level(concurrency, elapsed, run.objects, run.bytes, cpu, sorted(run.latencies), dict(run.errors))
