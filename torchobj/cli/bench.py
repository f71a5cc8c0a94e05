"""`torchobj bench`: reads a prefix as a loader does, and suggests settings."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import click

from torchobj._torchobj import ObjectRef
from torchobj.cli.bench_levels import Level, measure
from torchobj.cli.options import Command, settings
from torchobj.cli.output import duration, human_size, print_json, print_line, shown
from torchobj.cli.targets import parse_target
from torchobj.cli.url_argument import URL
from torchobj.config import AdvancedOptions
from torchobj.datasets.memory_budget import AHEAD_SHARE, budget_bytes

__all__ = ["bench"]

_LEVELS = "1,4,16,64,128,256"
_MAX_IN_FLIGHT = 4096

#: Share of the highest throughput at which more requests are not worth their load.
_ENOUGH = 0.9
#: Increase of the last level that suggests that more requests would help.
_STILL_RISING = 1.1
#: Share of the CPU time of all cores at which the client is the limit.
_CPU_BUSY = 0.8

_ROW = "{:>8}  {:>10}  {:>12}  {:>9}  {:>9}  {:>9}  {:>9}  {:>6}  {}"


def _levels(_: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        levels = sorted({int(part) for part in value.split(",")})
    except ValueError:
        levels = []
    if not levels or not all(1 <= level <= _MAX_IN_FLIGHT for level in levels):
        raise click.BadParameter(f"{value!r}: must be numbers of 1..{_MAX_IN_FLIGHT}, as {_LEVELS}", param=parameter)
    return levels


@click.command(cls=Command, short_help="Read a prefix as a loader does, and suggest settings.")
@click.argument("url", type=URL)
@click.option(
    "--concurrency", metavar="N,...", default=_LEVELS, show_default=True, callback=_levels, help="Concurrent requests."
)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=3, show_default=True, help="Time for each number.")
@click.option("--limit", type=click.IntRange(1), default=10_000, show_default=True, help="Number of objects to read.")
@click.option("--raw", is_flag=True, help="Take wildcards in the URL as they are.")
def bench(url: str, *, concurrency: list[int], seconds: float, limit: int, raw: bool) -> None:
    """Reads the objects under URL in random order with different numbers of concurrent requests.

    Prints objects and bytes per second, the latency of single reads meanwhile, and the CPU time of this process in
    cores; and the settings of a loader that follow. The reads are billed as those of a loader are.
    """
    chosen = settings()
    target = parse_target(url, raw=raw)
    config = chosen.config(url)
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
    if chosen.json:
        print_json({"objects": len(objects), "bytes": sum(sizes), "listed_s": round(listed_s, 4)})
    else:
        mean = human_size(sum(sizes) // len(sizes))
        print_line(
            f"{shown(target.text)}: {len(objects)} objects, listed in {duration(listed_s)}; mean size {mean}, "
            f"median {human_size(sizes[len(sizes) // 2])}, largest {human_size(sizes[-1])}"
        )
        print_line(_ROW.format("requests", "objects/s", "bytes/s", "p50", "p90", "p99", "max", "cores", "errors"))
    levels = []
    for number in concurrency:
        level = measure(store.url, objects, config, number, seconds)
        levels.append(level)
        if chosen.json:
            print_json(_fields(level))
        else:
            print_line(_row(level))
    advice = suggestions(levels, sum(sizes) / len(sizes), os.cpu_count() or 1)
    if chosen.json:
        print_json({"suggested_max_in_flight": knee(levels).concurrency, "suggestions": advice})
    else:
        print_line("")
        for line in advice:
            print_line(line)


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
        f"This machine reads at most {rate}; a training job that needs more waits for data.",
        f"{enough.concurrency} concurrent requests give {share} % of it: {setting}.",
    ]
    cap = AdvancedOptions.max_in_flight_cap
    if enough.concurrency <= cap:
        lines[-1] += f' The default max_in_flight="auto" finds the number itself, up to max_in_flight_cap={cap}.'
    else:
        advanced = f"AdvancedOptions(max_in_flight_cap={enough.concurrency})"
        lines[-1] += f' max_in_flight="auto" needs {advanced}; the default is {cap}.'
    previous = levels[-2] if len(levels) > 1 else None
    if enough is last and previous is not None and last.objects_per_s > _STILL_RISING * previous.objects_per_s:
        more = ",".join(str(min(_MAX_IN_FLIGHT, last.concurrency * factor)) for factor in (1, 2, 4))
        lines.append(f"The throughput was still rising: try --concurrency {more}.")
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
