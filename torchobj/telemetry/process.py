"""The metrics of this process, as a flat dict of plain numbers. Counts nothing itself."""

import sys

from torchobj import _torchobj
from torchobj.telemetry.billing import billed
from torchobj.telemetry.epochs import EPOCHS
from torchobj.telemetry.table import CAUSES, DURATIONS, EXPOSED, REQUESTS, of_source


def metrics() -> dict[str, float]:
    """Metrics of this process since its start: requests, bytes, latencies, memory, and exposed data time.

    They are those of all stores, datasets, loaders and checkpoints. A DataLoader worker that was forked starts at zero.
    The metrics of a single loader are `DataLoader.stats()`. A call takes less than a millisecond; counting needs no
    lock.

    Returns:
        Plain numbers by the names in `docs/metrics.md`, with units in their names. Names are stable; a percentile is
        absent before the first request. On other systems than Linux, those of the prefetcher are absent.

    Example:
        >>> import torchobj
        >>> _ = torchobj.Store("memory://counted").put("key", b"value")
        >>> torchobj.metrics()["torchobj.requests.put.ok"] >= 1
        True
    """
    found = _torchobj.request_stats()
    values = {
        f"{REQUESTS.name}.{operation}.{outcome}": count
        for operation, counts in found["requests"].items()
        for outcome, count in zip(found["outcomes"], counts, strict=True)
    }
    found |= billed(found)._asdict()
    values |= {metric.name: found[metric.key] for metric in of_source("requests")}
    of_epochs = EPOCHS.sums()
    values |= {f"{EXPOSED.name}.{cause}": of_epochs[cause] for cause in CAUSES}
    values |= {metric.name: of_epochs[metric.key] for metric in of_source("epochs")}
    for rows in DURATIONS:
        count, total_s, percentiles = found[rows[0].key]
        for metric, value in zip(rows, (count, total_s, *percentiles), strict=True):
            if value is not None:
                values[metric.name] = value
    if sys.platform == "linux":
        of_prefetcher = _torchobj.prefetch_stats()
        values |= {metric.name: of_prefetcher.get(metric.key, 0) for metric in of_source("prefetcher")}
    return values
