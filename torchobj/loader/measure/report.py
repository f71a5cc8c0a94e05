"""Describes what limits a loader, from its statistics. Measures nothing."""

import re

from torchobj.config import PriceOptions
from torchobj.loader.measure.exposed import Exposed, SlowestRank
from torchobj.loader.measure.pass_requests import PassReads
from torchobj.telemetry.billing import shown_dollars
from torchobj.telemetry.table import CAUSES, OF_LOADER, LoaderStats, capitalized

#: Minimum measured time, without startup, before the report names the limit: a short pass has few batches
#: and begins with nothing read ahead.
_MIN_MEASURED_S = 2.0
#: Below this share of waiting, of the time without startup, the input pipeline is not the bottleneck.
_NOT_LIMITING = 0.1
#: From this share of the time on, the report mentions the imports of decoders, or the start of workers.
_LONG_STARTUP = 0.1
#: Share of throttled responses from which the store is the limit.
_THROTTLED = 0.02
#: Share of the time from which a cause of waiting is listed.
_LISTED = 0.005
_NO_PRICES = PriceOptions()

#: What the loop waits for, in the words of the report, if it is not reads.
_WORDS = {
    "budget": "the memory budget",
    "decode": "decoding",
    "collate": "collation",
    "startup": "startup",
}


def report(
    stats: LoaderStats,
    unread: str | None = None,
    max_in_flight: int | None = None,
    latest: PassReads | None = None,
    prices: PriceOptions = _NO_PRICES,
    *,
    start_method: str = "fork",
    persistent_workers: bool = False,
    slowest: SlowestRank | None = None,
) -> str:
    """Returns short sentences, each on a line: what was done, what limits the loader, and what to change.

    Args:
        stats: The statistics of the loader.
        unread: The reason why nothing is read ahead; None if objects are read ahead.
        max_in_flight: `StoreConfig.max_in_flight`; None for "auto".
        latest: What was read in the last whole epoch, or in the first one so far; None if that was not counted.
        prices: What requests cost.
        start_method: How workers are started.
        persistent_workers: Whether they are kept between epochs.
        slowest: The rank that waited longest, if ranks were compared.
    """
    if not stats.batches:
        return "No batch was returned yet."
    startup = _startup(stats, start_method, persistent_workers=persistent_workers)
    measured_s = _measured_s(stats)
    if unread is None and measured_s < _MIN_MEASURED_S:
        measured = f"{measured_s:.1f} s without startup"
        limit = [f"{measured} are too short to tell what limits the loader: {_MIN_MEASURED_S:.0f} s are needed."]
    else:
        limit = _limit(stats, unread, max_in_flight, starts_slowly=bool(startup))
    requests = _requests(stats, latest, prices)
    return "\n".join([*_done(stats), *startup, *limit, *_slowest(stats, slowest), *requests, *_failures(stats)])


def _measured_s(stats: LoaderStats) -> float:
    """The time without startup, of which all shares in the report are."""
    return stats.elapsed_s - stats.startup_s


def _waited_share(stats: LoaderStats) -> float:
    measured_s = _measured_s(stats)
    return min(1.0, stats.waited_share * stats.elapsed_s / measured_s) if measured_s > 0 else 0.0


def _done(stats: LoaderStats) -> list[str]:
    # Reads of workers that do not use the prefetcher are not counted here.
    read = f", {stats.bytes_per_s / 1e6:.1f} MB/s from {_origin(stats)}" if stats.bytes_per_s else ""
    measured_s = _measured_s(stats)
    shares = [
        f"{seconds / measured_s:.0%} for {_words(stats, cause)}"
        for cause, seconds in zip(CAUSES, _waited_for(stats), strict=True)
        if seconds >= _LISTED * measured_s > 0
    ]
    # Where the time of reads is not known, it counts as decoding.
    causes = f": {', '.join(shares)}" if shares and stats.bytes_per_s else ""
    of = f"the {measured_s:.1f} s without startup" if stats.startup_s >= _LONG_STARTUP * stats.elapsed_s else "the time"
    return [
        f"{_count(stats.samples, 'sample')} in {stats.elapsed_s:.1f} s: {stats.samples_per_s:.0f} per second{read}.",
        f"The loop waited {_waited_share(stats):.0%} of {of}{causes}.",
    ]


def _is_cached(stats: LoaderStats) -> bool:
    """Whether the disk cache answered all reads."""
    return stats.cache_hits > 0 and not stats.billed_gets


def _origin(stats: LoaderStats) -> str:
    """Where objects were read from."""
    if not stats.cache_hits:
        return "the store"
    return "the disk cache" if _is_cached(stats) else "the disk cache and the store"


def _words(stats: LoaderStats, cause: str) -> str:
    """What the loop waits for."""
    if cause != "store":
        return _WORDS[cause]
    if not stats.cache_hits:
        return "the network or the store"
    return "the disk cache" if _is_cached(stats) else "the network, the store or the disk cache"


def _waited_for(stats: LoaderStats) -> Exposed:
    return Exposed(
        store=stats.waited_for_store_s,
        budget=stats.waited_for_budget_s,
        decode=stats.waited_for_decode_s,
        collate=stats.waited_for_collate_s,
        startup=0.0,
    )


def _slowest(stats: LoaderStats, slowest: SlowestRank | None) -> list[str]:
    if slowest is None:
        return []
    return [
        (
            f"Of {_count(slowest.ranks, 'rank')}, rank {slowest.rank} waited longest: {slowest.share:.0%} of its time, "
            f"mostly for {_words(stats, slowest.cause)}."
        )
    ]


def _requests(stats: LoaderStats, latest: PassReads | None, prices: PriceOptions) -> list[str]:
    """What was requested, what it costs, and what the disk cache had. Empty for reads of workers that are not counted
    here.
    """
    if not stats.bytes_per_s or latest is None:
        return []
    counted = latest.requests
    numbers = zip(("GET", "LIST", "PUT"), counted, strict=False)
    requests = ", ".join(f"{number:,} {name}" for name, number in numbers if number) or "none"
    received = f"{_mib(counted.received_bytes)} received"
    cost = f" ({shown_dollars(counted.dollars(prices))})" if prices.are_given else ""
    when = "in the last epoch" if latest.is_whole else "so far"
    hits = (
        f" From the disk cache (no requests): {latest.cache_hits:,} {'read' if latest.cache_hits == 1 else 'reads'}, "
        f"{_mib(latest.cache_hit_bytes)}."
        if latest.cache_hits
        else ""
    )
    return [f"Requests of this process {when}: {requests}; {received}{cost}.{hits}"]


def _startup(stats: LoaderStats, start_method: str, *, persistent_workers: bool) -> list[str]:
    of, lines = f"of the {stats.elapsed_s:.1f} s", []
    workers_s = stats.startup_s - stats.imports_s - stats.transform_imports_s
    if stats.imports_s >= _LONG_STARTUP * stats.elapsed_s:
        lines.append(f"Importing decoders took {stats.imports_s:.1f} {of}, once.")
    if stats.transform_imports_s >= _LONG_STARTUP * stats.elapsed_s:
        took = f"Imports in transforms took {stats.transform_imports_s:.1f} {of}"
        lines.append(f"{took}." if stats.workers else f"{took}, once.")
        if stats.workers:
            lines.append(
                "Each worker repeats them: persistent_workers=True does so once for all epochs."
                if start_method == "spawn"
                else "Import these modules before the loop, so that workers inherit them."
            )
    if workers_s < _LONG_STARTUP * stats.elapsed_s:
        return lines
    took = f"Starting and stopping workers took {workers_s:.1f} {of}"
    lines.append(f"{took}, once for all epochs." if persistent_workers and start_method != "spawn" else f"{took}.")
    if not persistent_workers:
        lines.append("persistent_workers=True starts them once for all epochs.")
    if start_method == "spawn":
        lines.append("multiprocessing_context='fork' or 'forkserver' starts faster than 'spawn'.")
    return lines


def _limit(stats: LoaderStats, unread: str | None, max_in_flight: int | None, *, starts_slowly: bool) -> list[str]:
    if _waited_share(stats) <= _NOT_LIMITING:
        if starts_slowly:
            return ["Apart from that, the input pipeline is not the bottleneck."]
        return ["The training step is the bottleneck, not the input pipeline.", "Nothing needs to change."]
    return _by_cause(stats, unread, max_in_flight)


def _by_cause(stats: LoaderStats, unread: str | None, max_in_flight: int | None) -> list[str]:
    waited_for = _waited_for(stats)
    cause = CAUSES[waited_for.index(max(waited_for))]
    not_ahead = [] if unread is None else [f"Nothing was read ahead, because {unread}."]
    if cause == "collate":
        return ["Collation is the limit.", _collate_advice(stats), *not_ahead]
    if not_ahead:
        return not_ahead
    if not stats.bytes_per_s:
        return _unmeasured(stats)
    if cause == "decode":
        return [
            "Decoding is the limit.",
            f"{_count(stats.workers, 'worker')} cannot decode fast enough: use more workers or a cheaper transform."
            if stats.workers
            else "The transform runs in the process of the loop: set num_workers.",
        ]
    return _by_reading(stats, max_in_flight)


def _unmeasured(stats: LoaderStats) -> list[str]:
    if not stats.workers:
        return ["Nothing was read ahead, so it cannot be measured whether reading or decoding is the limit."]
    return [
        "The workers read their own objects, so this process cannot measure whether reading or decoding is the limit.",
        "It reads for them if the dataset is one of torchobj, or has one as an attribute.",
    ]


def _collate_advice(stats: LoaderStats) -> str:
    if not stats.workers:
        return "The collate function runs in the process of the loop: set num_workers."
    return (
        f"{_count(stats.workers, 'worker')} cannot collate fast enough: use more workers or a cheaper collate_fn; one "
        "that fills torchobj.collate.empty saves a copy."
    )


def _by_reading(stats: LoaderStats, max_in_flight: int | None) -> list[str]:
    taken = stats.hits + stats.late + stats.queued + stats.misses
    if stats.throttled > _THROTTLED * (taken + stats.retries):
        return [
            f"The store is the limit: it throttled {_count(stats.throttled, 'request')}.",
            "Spread the keys over more prefixes, or read from fewer ranks at once.",
            "max_in_flight in StoreConfig limits the requests of each.",
        ]
    if stats.misses > taken / 2:
        return [
            (
                f"{stats.misses} of {_count(taken, 'object')} were not announced and were read on demand: the loop "
                "requests other samples than its sampler yields."
            )
        ]
    return _budget(stats) if stats.waited_for_budget_s else _network(stats, max_in_flight)


def _budget(stats: LoaderStats) -> list[str]:
    # Without known sizes, the bytes read ahead are an estimate.
    trainer = max(0, stats.used_bytes - stats.granted_bytes - stats.ahead_bytes)
    raise_it = "torchobj.set_memory_budget(budget_bytes) or TORCHOBJ_BUDGET_BYTES"
    if trainer > stats.budget_bytes / 2:
        change = f"This process keeps {_size(trainer)} of batches: release or copy them, or raise it by {raise_it}."
    elif stats.granted_bytes > stats.budget_bytes / 2:
        change = f"Workers hold most of it: use fewer workers or a smaller prefetch_factor, or raise it by {raise_it}."
    else:
        change = f"Raise it to read further ahead: {raise_it}."
    limit = [f"The memory budget of {_size(stats.budget_bytes)} is the limit."]
    if stats.memory_limited_share:
        limit.append(f"After {stats.memory_limited_share:.0%} of the reads there was no memory for the next.")
    return [*limit, change]


def _network(stats: LoaderStats, max_in_flight: int | None) -> list[str]:
    limit = f"{capitalized(_words(stats, 'store'))} is the limit."
    if _is_cached(stats):
        return [limit, "A faster disk helps, or more memory for the kernel's cache of files."]
    return [
        limit,
        (
            f"The median time to first byte is {_time(stats.first_byte_p50_s)}, its 99th percentile "
            f"{_time(stats.first_byte_p99_s)}."
        ),
        f"max_in_flight={max_in_flight} in StoreConfig was reached: a higher number, or 'auto', may help."
        if stats.request_limited_share > 0.5 and max_in_flight is not None
        else "A bucket in the same region, or more bandwidth to it, helps.",
    ]


def _failures(stats: LoaderStats) -> list[str]:
    """The sentences of the table of metrics for the counters that are not zero."""
    counted = [(metric.sentence, getattr(stats, metric.key)) for metric in OF_LOADER if metric.sentence]
    return [_filled(sentence, number, budget=_size(stats.budget_bytes)) for sentence, number in counted if number]


def _filled(sentence: str, number: int, **others: str) -> str:
    """A sentence of the table of metrics with its numbers, and `[one|several]` in the singular or plural."""
    word = r"\1" if number == 1 else r"\2"
    return re.sub(r"\[(\w+)\|(\w+)\]", word, sentence).format(number=number, **others)


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else f'{one}s'}"


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1000:.1f} ms"
