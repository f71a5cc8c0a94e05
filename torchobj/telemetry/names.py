"""The names, units and kinds of the metrics of a process. `docs/metrics.md` explains them, and a test compares the two.

A name is stable: it is not used for anything else later. Units are those of OpenTelemetry (UCUM).
"""

from typing import Literal, NamedTuple

#: A counter only grows. A gauge is a current value.
Kind = Literal["counter", "gauge"]


class Metric(NamedTuple):
    """A metric of a process."""

    name: str
    unit: str
    kind: Kind
    description: str
    source: str
    """Its key in the statistics of the native module."""


#: The number of requests; its name is followed by the operation and the outcome.
REQUESTS = Metric("torchobj.requests", "{request}", "counter", "Attempts, by operation and outcome", "requests")

#: Exposed data time of all loaders; its name is followed by the cause.
EXPOSED = Metric("torchobj.exposed_seconds", "s", "counter", "Time that loops waited for data, by cause", "exposed")

#: What a loop waits for.
CAUSES = ("store", "budget", "decode", "collate", "startup")

#: Those that have several values, and the parts that follow their names.
BY_ATTRIBUTES = {REQUESTS: ("operation", "outcome"), EXPOSED: ("cause",)}

#: Those of all loaders of this process.
OF_EPOCHS = (
    Metric("torchobj.epochs.elapsed_seconds", "s", "counter", "Time within epochs", "elapsed_s"),
    Metric("torchobj.epochs.batches", "{batch}", "counter", "Batches returned to loops", "batches"),
    Metric("torchobj.epochs.samples", "{sample}", "counter", "Samples in these batches", "samples"),
)

#: Those of all clients of this process.
OF_REQUESTS = (
    Metric("torchobj.received_bytes", "By", "counter", "Bytes of objects that were received", "received_bytes"),
    Metric("torchobj.sent_bytes", "By", "counter", "Bytes of objects and parts that were sent", "sent_bytes"),
    Metric("torchobj.retries", "{request}", "counter", "Attempts after the first", "retries"),
    Metric("torchobj.throttled", "{response}", "counter", "Responses with which a store throttled", "throttled"),
    Metric("torchobj.connect_failures", "{connection}", "counter", "Connections that failed", "connect_failures"),
    Metric("torchobj.hedges", "{request}", "counter", "Second requests for a late response", "hedges"),
    Metric("torchobj.hedges_won", "{request}", "counter", "Second requests that were answered first", "hedges_won"),
    Metric("torchobj.permits.used", "{request}", "gauge", "Requests in flight", "in_flight"),
    Metric("torchobj.permits.limit", "{request}", "gauge", "Current maximum of requests in flight", "in_flight_limit"),
    Metric("torchobj.permits.backing_off", "{request}", "gauge", "Requests that wait before a retry", "backing_off"),
    Metric("torchobj.uploads.in_flight", "{upload}", "gauge", "Uploads in parts that have not ended", "uploads"),
    Metric("torchobj.uploads.in_flight_parts", "{part}", "gauge", "Parts that have not been received", "parts"),
    Metric("torchobj.uploads.in_flight_bytes", "By", "gauge", "Bytes of these parts", "part_bytes"),
)

#: Times of requests: their names, which are followed by `COUNT`, `SUM` or a percentile. With their keys.
DURATIONS = {
    "torchobj.read.first_byte": "first_byte",
    "torchobj.read.body": "body",
    "torchobj.read.duration": "reads",
    "torchobj.other_requests": "others",
}
COUNT, SUM, PERCENTILES = "count", "seconds", ("p50_seconds", "p90_seconds", "p99_seconds")

#: Those of the prefetcher, which exists from the first read of a dataset on Linux.
OF_PREFETCHER = (
    Metric("torchobj.prefetch.hits", "{object}", "counter", "Objects in memory when requested", "hits"),
    Metric("torchobj.prefetch.late", "{object}", "counter", "Objects that were being read when requested", "late"),
    Metric("torchobj.prefetch.queued", "{object}", "counter", "Objects announced, but not being read", "queued"),
    Metric("torchobj.prefetch.misses", "{object}", "counter", "Objects that were not announced", "misses"),
    Metric("torchobj.prefetch.objects", "{object}", "counter", "Objects that were read", "objects"),
    Metric("torchobj.prefetch.bytes", "By", "counter", "Bytes of these objects", "bytes"),
    Metric("torchobj.prefetch.failed", "{object}", "counter", "Reads that failed after all retries", "failed"),
    Metric("torchobj.prefetch.evicted", "{object}", "counter", "Objects that were dropped to free memory", "evicted"),
    Metric("torchobj.prefetch.over_budget", "{object}", "counter", "Reads that exceeded the budget", "over_budget"),
    Metric(
        "torchobj.prefetch.memory_limited",
        "{object}",
        "counter",
        "Reads after which no other started for lack of memory",
        "memory_limited",
    ),
    Metric(
        "torchobj.prefetch.request_limited",
        "{object}",
        "counter",
        "Reads after which no other started because of the limit on requests",
        "request_limited",
    ),
    Metric("torchobj.prefetch.waited_seconds", "s", "counter", "Time that readers waited for objects", "waited_s"),
    Metric("torchobj.prefetch.announced", "{object}", "gauge", "Objects that are announced", "announced"),
    Metric("torchobj.prefetch.in_flight", "{object}", "gauge", "Objects that are being read", "in_flight"),
    Metric("torchobj.memory.budget_bytes", "By", "gauge", "Memory budget of the prefetcher", "budget_bytes"),
    Metric("torchobj.memory.used_bytes", "By", "gauge", "Memory in use", "used_bytes"),
    Metric("torchobj.memory.resident_bytes", "By", "gauge", "Memory in use or kept for reuse", "resident_bytes"),
    Metric("torchobj.memory.granted_bytes", "By", "gauge", "Part of used_bytes that workers hold", "granted_bytes"),
    Metric("torchobj.memory.ahead_bytes", "By", "gauge", "Part of used_bytes that was read ahead", "ahead_bytes"),
    Metric("torchobj.memory.block_bytes", "By", "gauge", "Memory of batches, in addition", "block_bytes"),
    Metric("torchobj.memory.used_block_bytes", "By", "gauge", "Part of block_bytes that is in use", "used_block_bytes"),
    Metric(
        "torchobj.memory.blocks_refused",
        "{batch}",
        "counter",
        "Batches that did not fit this memory",
        "blocks_refused",
    ),
)
