"""The table of metrics: name, unit, kind, text and source of each metric stand here, once. Counts nothing itself.

`LoaderStats`, the last sentences of `DataLoader.report()`, `torchobj.metrics()`, the instruments of `torchobj.otel` and
the tables of `docs/metrics.md` (`make metrics`) are made from it. A counter of the native module is a row here and,
under the same key, a line of `prefetch/stats.rs` or `policy/metrics.rs` in `rust/torchobj-core/src/`.

A name is stable: it is not used for anything else later. Units are those of OpenTelemetry (UCUM).
"""

import dataclasses
import itertools
import re
from typing import Any, Literal, NamedTuple

#: A counter only grows. A gauge is a current value.
Kind = Literal["counter", "gauge"]

#: The statistics that have the values of a process: the sums over its loaders (`telemetry/epochs.py`), and those of the
#: native module, `request_stats()` and `prefetch_stats()`. The prefetcher exists from the first read of a dataset on
#: Linux.
Source = Literal["epochs", "requests", "prefetcher"]


class Metric(NamedTuple):
    """A row of the table."""

    key: str
    """Its key in the statistics of its source; of a metric of a loader, the field of `LoaderStats`."""
    kind: Kind
    unit: str
    text: str
    """What it is, without a capital and a full stop. The names of other metrics in it are fields of `LoaderStats`."""
    source: Source | None = None
    name: str = ""
    """Its name in `torchobj.metrics()`. Empty, and without a source, if a process does not have it."""
    attributes: tuple[str, ...] = ()
    """The parts that follow the name of a metric with several values."""
    sentence: str = ""
    """What a report says of a value other than zero. `{number}` is the value, `[one|several]` a word in the singular
    and in the plural, `{budget}` the memory budget."""

    @property
    def description(self) -> str:
        """The text with a capital, without Markdown."""
        return capitalized(self.text).replace("`", "")


class Group(NamedTuple):
    """Metrics of a process and of a loader with the same source and the same beginning of their names."""

    source: Source
    prefix: str


_EPOCHS = Group("epochs", "torchobj.epochs.")
_REQUESTS = Group("requests", "torchobj.")
_PREFETCH = Group("prefetcher", "torchobj.prefetch.")
_MEMORY = Group("prefetcher", "torchobj.memory.")


def _counter(unit: str, text: str, group: Group | None = None, *, sentence: str = "") -> Any:
    """A field of `LoaderStats`. With a group, it is also a metric of a process."""
    row = {"kind": "counter", "unit": unit, "text": text, "group": group, "sentence": sentence}
    return dataclasses.field(default=0, metadata=row)


def _gauge(unit: str, text: str, group: Group | None = None, *, default: float | None = 0) -> Any:
    """A field of `LoaderStats`. With a group, it is also a metric of a process."""
    row = {"kind": "gauge", "unit": unit, "text": text, "group": group, "sentence": ""}
    return dataclasses.field(default=default, metadata=row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Statistics of a loader since its first batch was requested, without the pauses between epochs.

    The figures of objects and requests are those that were read for this loader. The loaders of a process share one
    prefetcher: the memory and `in_flight` are of all of them. Billed requests and received bytes are those of the whole
    process within the epochs of the loader, also those of other loaders and of saves. Times are in seconds, shares from
    0 to 1. A time that was never measured is None.
    """

    # `Meter.stats` computes some of the fields. All others have the values of `prefetch_stats()` under the same key.
    batches: int = _counter("{batch}", "batches returned to the loop", _EPOCHS)
    samples: int = _counter("{sample}", "samples returned to the loop", _EPOCHS)
    elapsed_s: float = _counter("s", "time within epochs", _EPOCHS)
    startup_s: float = _counter(
        "s",
        "part of `elapsed_s` spent on imports, starting workers, until the first batch and until the last worker has "
        "started, and stopping them",
    )
    imports_s: float = _counter("s", "part of `startup_s` in which this process imported decoders")
    transform_imports_s: float = _counter(
        "s", "part of `startup_s` in which the loop waited for other imports, of transforms, and of workers"
    )
    waited_s: float = _counter("s", "part of the remaining time in which the loop waited for its next batch")
    samples_per_s: float = _gauge("{sample}/s", "samples per second of `elapsed_s`")
    bytes_per_s: float = _gauge(
        "By/s", "bytes read for this loader, per second of `elapsed_s`; 0 before the first batch"
    )
    waited_share: float = _gauge("1", "`waited_s` as a share of `elapsed_s`")
    workers: int = _gauge("{process}", "number of worker processes of the loader")
    exposed_share: float = _gauge("1", "exposed data time, `waited_s` and `startup_s`, as a share of `elapsed_s`")
    waited_for_store_s: float = _counter("s", "part of `waited_s` for objects, because of the network or the store")
    waited_for_budget_s: float = _counter(
        "s", "part of `waited_s` for objects that the memory budget did not allow to be read earlier"
    )
    waited_for_decode_s: float = _counter(
        "s", "part of `waited_s` for decoders and transforms, and for reads that do not use the prefetcher"
    )
    waited_for_collate_s: float = _counter("s", "part of `waited_s` for the collate function")
    reading_share: float = _gauge(
        "1", "share of the time in which a worker, or without workers the loop, waited for objects"
    )
    failed_samples: int = _counter(
        "{sample}",
        "samples of this loader that failed, and were replaced or skipped",
        sentence="{number} [sample|samples] failed, and [was|were] replaced or skipped.",
    )
    hits: int = _counter("{object}", "objects that were in memory when they were requested", _PREFETCH)
    late: int = _counter("{object}", "objects that were being read when they were requested", _PREFETCH)
    queued: int = _counter("{object}", "objects that were announced, and whose read had not started", _PREFETCH)
    misses: int = _counter("{object}", "objects that were not announced", _PREFETCH)
    failed: int = _counter(
        "{object}",
        "reads that failed after all retries",
        _PREFETCH,
        sentence="{number} [read|reads] failed after all retries.",
    )
    evicted: int = _counter(
        "{object}", "objects that were dropped to free memory, and have to be read again", _PREFETCH
    )
    over_budget: int = _counter(
        "{object}",
        "number of times the budget was exceeded for an object that was demanded",
        _PREFETCH,
        sentence="The budget was exceeded {number} [time|times] for a batch that the loop waited for.",
    )
    in_flight: int = _gauge("{object}", "current number of reads of announced objects", _PREFETCH)
    in_flight_limit: int = _gauge(
        "{object}", "current maximum of `in_flight`; reads of objects that a worker waits for may exceed it"
    )
    budget_bytes: int = _gauge("By", "memory budget of objects that are read ahead", _MEMORY)
    used_bytes: int = _gauge("By", "memory in use now", _MEMORY)
    granted_bytes: int = _gauge(
        "By", "part of `used_bytes` that workers hold, or that is being transferred to the loop", _MEMORY
    )
    ahead_bytes: int = _gauge("By", "part of `used_bytes` that was read ahead or is being read", _MEMORY)
    block_bytes: int = _gauge(
        "By",
        "memory of batches that workers build or have built, in addition to `used_bytes`; reused. Batches that were "
        "held during a fork do not count: their memory is freed when the child exits",
        _MEMORY,
    )
    blocks_refused: int = _counter(
        "{batch}",
        "number of times a batch did not fit the memory of batches, which is limited to `budget_bytes` and to 256 "
        "blocks, or a quarter of the limit on open files",
        _MEMORY,
        sentence="{number} [batch|batches] exceeded the limit on the memory of batches, {budget} or 256 blocks, and "
        "[was|were] sent in new shared memory.\n"
        "Keep fewer batches, or call torchobj.set_memory_budget(budget_bytes) at the start of the program.",
    )
    first_byte_p50_s: float | None = _gauge("s", "median time from a request to the head of its response", default=None)
    first_byte_p99_s: float | None = _gauge(
        "s", "99th percentile of the time from a request to the head of its response", default=None
    )
    body_p50_s: float | None = _gauge("s", "median time from the head of a response to its last byte", default=None)
    body_p99_s: float | None = _gauge(
        "s", "99th percentile of the time from the head of a response to its last byte", default=None
    )
    retries: int = _counter(
        "{request}",
        "attempts after the first",
        _REQUESTS,
        sentence="{number} [request|requests] failed and [was|were] retried.",
    )
    throttled: int = _counter("{response}", "responses with which the store throttled (503, 429)", _REQUESTS)
    connect_failures: int = _counter(
        "{connection}",
        "connections that failed",
        _REQUESTS,
        sentence="{number} [connection|connections] failed.",
    )
    hedges: int = _counter("{request}", "second requests that were sent because the first response was late", _REQUESTS)
    hedges_won: int = _counter(
        "{request}",
        "second requests that were answered first",
        _REQUESTS,
        sentence="{number} hedged [request|requests] [was|were] answered before the original request.",
    )
    billed_gets: int = _counter(
        "{request}", "requests that S3 bills as GET, and Google Cloud Storage in class B: reads and HEAD", _REQUESTS
    )
    received_bytes: int = _counter("By", "bytes of objects that were received", _REQUESTS)
    cache_hits: int = _counter("{read}", "reads that the disk cache answered, without a request", _REQUESTS)
    cache_hit_bytes: int = _counter("By", "bytes that were read from the disk cache", _REQUESTS)
    memory_limited_share: float = _gauge("1", "share of reads after which no further read started for lack of memory")
    request_limited_share: float = _gauge(
        "1", "share of reads after which no further read started because `in_flight_limit` was reached"
    )

    def as_dict(self) -> dict[str, float]:
        """The statistics by the names of `docs/metrics.md`, such as `torchobj.loader.waited_seconds`.

        Returns:
            Plain numbers, without the times that were never measured. Names and units are stable.
        """
        values = dataclasses.asdict(self)
        return {f"torchobj.loader.{with_units(key)}": value for key, value in values.items() if value is not None}


def with_units(key: str) -> str:
    """A key with its unit as a word, as in the names of metrics: `waited_seconds` of `waited_s`."""
    return re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", key))


def capitalized(text: str) -> str:
    """The text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def _of_process(key: str, kind: Kind, unit: str, text: str, group: Group, *, name: str = "") -> Metric:
    """A metric that only a process has. Its name follows from its key unless it has another one in its group."""
    return Metric(key, kind, unit, text, group.source, group.prefix + (name or with_units(key)))


def _of_field(field: dataclasses.Field[Any]) -> Metric:
    """The row of a field of `LoaderStats`."""
    columns = dict(field.metadata)
    group: Group | None = columns.pop("group")
    if group is not None:
        columns |= {"source": group.source, "name": group.prefix + with_units(field.name)}
    return Metric(field.name, **columns)


#: The metrics of a loader.
OF_LOADER = tuple(map(_of_field, dataclasses.fields(LoaderStats)))

LoaderStats.__doc__ = f"{LoaderStats.__doc__}\n    Attributes:\n" + "".join(
    f"        {metric.key}: {capitalized(metric.text)}.\n" for metric in OF_LOADER
)

#: What a loop waits for.
CAUSES = ("store", "budget", "decode", "collate", "startup")

#: Exposed data time of all loaders, by cause.
EXPOSED = Metric(
    "exposed",
    "counter",
    "s",
    "exposed data time of all loaders; the causes are " + ", ".join(f"`{cause}`" for cause in CAUSES),
    name="torchobj.exposed_seconds",
    attributes=("cause",),
)

#: The number of requests, by operation and outcome.
REQUESTS = Metric(
    "requests",
    "counter",
    "{request}",
    "attempts; each retry is another one",
    name="torchobj.requests",
    attributes=("operation", "outcome"),
)


def _durations(key: str, name: str, times: str) -> tuple[Metric, ...]:
    """The number of measured times, their sum and their percentiles, in the order of `request_stats()`."""
    percentile = f"percentile of the time {times}, at most a quarter too long"
    return (
        Metric(key, "counter", "{request}", f"number of measured times {times}", name=f"{name}.count"),
        Metric(key, "counter", "s", f"sum of the times {times}", name=f"{name}.seconds"),
        *(Metric(key, "gauge", "s", f"{of}th {percentile}", name=f"{name}.p{of}_seconds") for of in (50, 90, 99)),
    )


#: The times of requests.
DURATIONS = (
    _durations("first_byte", "torchobj.read.first_byte", "from the request of a read to the head of its response"),
    _durations("body", "torchobj.read.body", "from the head of the response to a read to its last byte"),
    _durations("reads", "torchobj.read.duration", "from the request of a read to its last byte"),
    _durations("others", "torchobj.other_requests", "of a request that is not a read and succeeded"),
)

_OF_PROCESS_ONLY = (
    _of_process(
        "billed_lists",
        "counter",
        "{request}",
        "requests that S3 bills as LIST, and Google Cloud Storage in class A",
        _REQUESTS,
    ),
    _of_process(
        "billed_puts",
        "counter",
        "{request}",
        "requests that S3 bills as PUT, COPY or POST, and Google Cloud Storage in class A: writes and copies of "
        "objects, and parts of uploads",
        _REQUESTS,
    ),
    _of_process("cache_admitted", "counter", "{file}", "files that were written to the disk cache", _REQUESTS),
    _of_process("cache_admitted_bytes", "counter", "By", "bytes of objects in these files", _REQUESTS),
    _of_process(
        "cache_dropped",
        "counter",
        "{file}",
        "objects and ranges that were received and not written to the disk cache: they were too large or had another "
        "checksum, or the disk was full, slow or failed",
        _REQUESTS,
    ),
    _of_process(
        "cache_damaged",
        "counter",
        "{file}",
        "files of the disk cache that were damaged and were deleted; the objects were read from the store",
        _REQUESTS,
    ),
    _of_process(
        "cache_evicted", "counter", "{file}", "files of the disk cache that were deleted to make room", _REQUESTS
    ),
    _of_process("cache_pending", "gauge", "{file}", "files that wait to be written to the disk cache", _REQUESTS),
    _of_process("sent_bytes", "counter", "By", "bytes of objects and parts that were sent", _REQUESTS),
    _of_process("in_flight", "gauge", "{request}", "requests in flight", _REQUESTS, name="permits.used"),
    _of_process(
        "in_flight_limit",
        "gauge",
        "{request}",
        "current maximum of requests in flight",
        _REQUESTS,
        name="permits.limit",
    ),
    _of_process(
        "backing_off", "gauge", "{request}", "requests that wait before a retry", _REQUESTS, name="permits.backing_off"
    ),
    _of_process(
        "uploads",
        "gauge",
        "{upload}",
        "uploads in parts that have begun and not ended; completed ones are `torchobj.requests.commit.ok`",
        _REQUESTS,
        name="uploads.in_flight",
    ),
    _of_process(
        "parts",
        "gauge",
        "{part}",
        "parts of uploads that are being sent or wait to be sent; completed ones are `torchobj.requests.put_part.ok`",
        _REQUESTS,
        name="uploads.in_flight_parts",
    ),
    _of_process(
        "part_bytes",
        "gauge",
        "By",
        "bytes of the parts that are being sent or wait to be sent",
        _REQUESTS,
        name="uploads.in_flight_bytes",
    ),
    _of_process("objects", "counter", "{object}", "objects that were read", _PREFETCH),
    _of_process("bytes", "counter", "By", "bytes of the objects that were read", _PREFETCH),
    _of_process(
        "memory_limited",
        "counter",
        "{object}",
        "reads after which no other started for lack of memory, or because no further object was announced for lack of "
        "memory",
        _PREFETCH,
    ),
    _of_process(
        "request_limited",
        "counter",
        "{object}",
        "reads after which no other started because of the limit on requests",
        _PREFETCH,
    ),
    _of_process(
        "waited_s",
        "counter",
        "s",
        "time that workers and loops waited for objects, from the request to its last answer, summed over all requests",
        _PREFETCH,
    ),
    _of_process("announced", "gauge", "{object}", "objects that are announced or demanded, and not taken", _PREFETCH),
    _of_process(
        "resident_bytes", "gauge", "By", "memory in use, and free memory that is kept for the next objects", _MEMORY
    ),
    _of_process(
        "used_block_bytes",
        "gauge",
        "By",
        "part of `block_bytes` that batches occupy; the rest is kept for the next ones",
        _MEMORY,
    ),
)


def of_source(source: Source) -> tuple[Metric, ...]:
    """The metrics of a process with this source."""
    return tuple(metric for metric in OF_LOADER + _OF_PROCESS_ONLY if metric.source == source)


#: The metrics of a process.
OF_PROCESS = (
    EXPOSED,
    *of_source("epochs"),
    REQUESTS,
    *of_source("requests"),
    *itertools.chain(*DURATIONS),
    *of_source("prefetcher"),
)
