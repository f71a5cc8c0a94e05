"""`torchobj bench`: reads a prefix as a loader does, and suggests settings.

Measures what the prefix gives at numbers of concurrent requests: objects and bytes per second, latency, CPU. What an
epoch costs is in `estimate`.
"""

import collections
import dataclasses
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.core import ParameterSource

from torchobj._torchobj import ObjectRef
from torchobj.cli.estimate import estimate
from torchobj.cli.options import Command, settings
from torchobj.cli.output import duration, human_size, print_line, shown
from torchobj.cli.targets import URL, parse_target, raw_option
from torchobj.config import AdvancedOptions, StoreConfig
from torchobj.exceptions import StoreError
from torchobj.store import Store
from torchobj.workers.memory_budget import AHEAD_SHARE, budget_bytes

#: Numbers of concurrent requests; the last one is doubled while the throughput rises.
_LEVELS = (1, 4, 16, 64, 128, 256)
_MAX_IN_FLIGHT = 4096

#: Share of the highest throughput at which more requests are not worth their load.
_ENOUGH = 0.9
#: Increase of the last level over all others that suggests that more requests would help.
_STILL_RISING = 1.1
#: Share of the CPU time of all cores at which the client is the limit.
_CPU_BUSY = 0.8

_ROW = "{:>8}  {:>10}  {:>12}  {:>9}  {:>9}  {:>9}  {:>9}  {:>6}  {}"

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
    rng = random.Random(0)  # noqa: S311  an order of reads
    rounds = (rng.sample(objects, len(objects)) for _ in itertools.count())
    endless = itertools.chain.from_iterable(rounds)
    while True:
        yield list(itertools.islice(endless, size))


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
            store = Store(url, config=config.replaced(max_in_flight=number))
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


def _levels(_: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        levels = sorted({int(part) for part in value.split(",")})
    except ValueError:
        levels = []
    if not levels or not all(1 <= level <= _MAX_IN_FLIGHT for level in levels):
        expected = f"must be numbers of 1..{_MAX_IN_FLIGHT}, such as 64,128,256"
        raise click.BadParameter(f"{value!r}: {expected}", param=parameter)
    return levels


@click.command(cls=Command, short_help="Read a prefix as a loader does, and suggest settings.")
@click.argument("url", type=URL)
@click.option(
    "--concurrency",
    metavar="N,...",
    callback=_levels,
    help="Concurrent requests.  [default: 1 to 256, and more while the throughput rises]",
)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=3, show_default=True, help="Time for each number.")
@click.option("--limit", type=click.IntRange(1), default=10_000, show_default=True, help="Number of objects to read.")
@click.option("--estimate", "is_estimate", is_flag=True, help="Print requests and price of an epoch; reads no samples.")
@click.option("--columns", metavar="NAME,...", help="With --estimate: columns of Parquet files.  [default: all]")
@raw_option
def bench(
    url: str,
    *,
    concurrency: list[int] | None,
    seconds: float,
    limit: int,
    is_estimate: bool,
    columns: str | None,
    raw: bool,
) -> None:
    """Reads the objects under URL in random order with different numbers of concurrent requests.

    Prints objects and bytes per second, the latency of single reads meanwhile, and the CPU time of this process in
    cores; and the settings of a loader that follow. The reads are billed as those of a loader are.

    With --estimate, lists all objects once and prints how many requests an epoch of a rank that reads all of them
    sends, and what they cost at the prices of the configuration file; with a disk cache in that file, also in later
    epochs.
    """
    chosen = settings()
    target = parse_target(url, raw=raw)
    config = chosen.config(url)
    if columns is not None and not is_estimate:
        raise click.UsageError("--columns: needs --estimate")
    if is_estimate:
        context = click.get_current_context()
        for name in ("concurrency", "seconds", "limit"):
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name}: not with --estimate, which reads no samples and lists all objects")
        estimate(target, config, None if columns is None else columns.split(","), chosen)
        return
    store, prefix = target.open(config)
    started = time.perf_counter()
    objects = [
        ObjectRef(f"{store.url}/{info.key}", size=info.size)
        for info in itertools.islice((info for info in target.objects(store, prefix) if info.size), limit)
    ]
    if not objects:
        raise target.nothing()
    listed_s = time.perf_counter() - started
    sizes = sorted(ref.size or 0 for ref in objects)
    mean = human_size(sum(sizes) // len(sizes))
    chosen.show(
        {"objects": len(objects), "bytes": sum(sizes), "listed_s": round(listed_s, 4)},
        f"{shown(target.text)}: {len(objects)} objects, listed in {duration(listed_s)}; mean size {mean}, "
        f"median {human_size(sizes[len(sizes) // 2])}, largest {human_size(sizes[-1])}",
    )
    if not chosen.json:
        print_line(_ROW.format("requests", "objects/s", "bytes/s", "p50", "p90", "p99", "max", "cores", "errors"))
    levels: list[Level] = []
    waiting = list(concurrency or _LEVELS)
    while waiting:
        level = measure(store.url, objects, config, waiting.pop(0), seconds)
        levels.append(level)
        chosen.show(_fields(level), _row(level))
        if concurrency is None and not waiting and is_rising(levels) and level.concurrency < _MAX_IN_FLIGHT:
            waiting = [2 * level.concurrency]
    advice = suggestions(levels, sum(sizes) / len(sizes), os.cpu_count() or 1)
    lines = "\n".join(("", *advice))
    chosen.show({"suggested_max_in_flight": knee(levels).concurrency, "suggestions": advice}, lines)


def _percentiles(level: Level) -> list[float | None]:
    return [level.latency_s(share) for share in (0.5, 0.9, 0.99, 1.0)]


def _row(level: Level) -> str:
    latencies = ["-" if value is None else duration(value) for value in _percentiles(level)]
    errors = ", ".join(f"{count} {name}" for name, count in level.errors.items()) or "-"
    rates = f"{level.objects_per_s:.0f}", f"{human_size(int(level.bytes_per_s))}/s"
    return _ROW.format(level.concurrency, *rates, *latencies, f"{level.cpu_s / level.seconds:.2f}", errors)


def _fields(level: Level) -> dict[str, Any]:
    names = ("p50_s", "p90_s", "p99_s", "max_s")
    return {
        "concurrency": level.concurrency,
        "seconds": round(level.seconds, 3),
        "objects_per_s": round(level.objects_per_s, 1),
        "bytes_per_s": round(level.bytes_per_s),
        "cores": round(level.cpu_s / level.seconds, 3),
        "errors": level.errors,
        **dict(zip(names, _percentiles(level), strict=True)),
    }


def is_rising(levels: Sequence[Level]) -> bool:
    """Whether the throughput of the last level is clearly higher than that of each one before it."""
    before = max((level.objects_per_s for level in levels[:-1]), default=float("inf"))
    return levels[-1].objects_per_s > _STILL_RISING * before


def knee(levels: Sequence[Level]) -> Level:
    """The lowest level whose throughput is nearly the highest."""
    best = max(level.objects_per_s for level in levels)
    return next(level for level in levels if level.objects_per_s >= _ENOUGH * best)


def suggestions(levels: Sequence[Level], mean_bytes: float, cores: int) -> list[str]:
    """Sentences about the settings of a loader that follow from the measurements.

    Args:
        levels: The measurements, by ascending concurrency.
        mean_bytes: Mean size of the objects.
        cores: Number of cores of the machine.
    """
    best, enough, last = max(levels, key=lambda level: level.objects_per_s), knee(levels), levels[-1]
    if best.objects == 0:
        return ["No object could be read; see the errors above."]
    rate = f"{best.objects_per_s:.0f} objects/s, {human_size(int(best.bytes_per_s))}/s"
    share = round(100 * enough.objects_per_s / best.objects_per_s)
    setting = f"StoreConfig(max_in_flight={enough.concurrency})"
    lines = [
        f"This machine reads at least {rate}: the throughput still rises at {last.concurrency} requests."
        if is_rising(levels)
        else f"This machine reads at most {rate}; a training job that needs more waits for data.",
        f"{enough.concurrency} concurrent requests give {share} % of it: {setting}.",
    ]
    cap = AdvancedOptions.max_in_flight_cap
    if enough.concurrency <= cap:
        lines[-1] += f' The default max_in_flight="auto" finds the number itself, up to max_in_flight_cap={cap}.'
    else:
        advanced = f"AdvancedOptions(max_in_flight_cap={enough.concurrency})"
        lines[-1] += f' max_in_flight="auto" needs {advanced}; the default is {cap}.'
    if is_rising(levels) and last.concurrency < _MAX_IN_FLIGHT:
        more = ",".join(str(min(_MAX_IN_FLIGHT, last.concurrency * factor)) for factor in (1, 2, 4))
        lines.append(f"Try more of them: --concurrency {more}.")
    if best.cpu_s / best.seconds > _CPU_BUSY * cores:
        lines.append(f"The CPU is the limit: {best.cpu_s / best.seconds:.1f} of {cores} cores were busy.")
    if any("Throttled" in name for level in levels for name in level.errors):
        lines.append("The store throttled: spread keys over several prefixes, or read fewer objects at a time.")
    needed = int(2 * enough.concurrency * mean_bytes / AHEAD_SHARE)
    have = budget_bytes()
    if needed > have:
        lines.append(
            f"Twice as many objects as requests need a memory budget of {human_size(needed)}, this process has "
            f"{human_size(have)}: torchobj.set_memory_budget({needed})."
        )
    return lines
