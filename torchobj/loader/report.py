"""What held a loader back, in words, from its numbers. Measures nothing."""

from torchobj.loader.stats import LoaderStats

__all__ = ["report"]

#: Below this share of waiting the input pipeline is not the bottleneck.
_CALM = 0.1
#: From this share of the time on, starting workers is worth a word.
_LONG_STARTUP = 0.1
#: So many answers of a hundred that ask for fewer requests make the store the limit.
_THROTTLED = 0.02
#: Of the share that the loop waits, what waiting for objects must be for reading to be the cause.
_BY_READING = 0.5


def report(stats: LoaderStats, unread: str | None = None, max_in_flight: int | None = None) -> str:
    """One paragraph: what was done, what held it back, and what to change.

    Args:
        stats: What was done.
        unread: Why nothing is read ahead, where that is so.
        max_in_flight: That of the configuration; None for "auto".
    """
    if not stats.batches:
        return "Nothing was handed out yet."
    return " ".join([_done(stats), *_startup(stats), _held_back(stats, unread, max_in_flight), *_besides(stats)])


def _done(stats: LoaderStats) -> str:
    # What workers read for themselves is not known here.
    read = f", {stats.bytes_per_s / 1e6:.1f} MB/s from the store" if stats.bytes_per_s else ""
    return (
        f"{stats.samples} samples in {stats.elapsed_s:.1f} s: {stats.samples_per_s:.0f} a second{read}; the loop "
        f"waited {stats.waited_share:.0%} of the time."
    )


def _startup(stats: LoaderStats) -> list[str]:
    if not _starts_long(stats):
        return []
    said = (
        f"Starting and ending workers took another {stats.startup_s:.1f} s of it: persistent_workers=True "
        "starts them once for all epochs, and multiprocessing_context='fork' or 'forkserver' sooner than 'spawn'."
    )
    return [said]


def _starts_long(stats: LoaderStats) -> bool:
    return stats.startup_s >= _LONG_STARTUP * stats.elapsed_s


def _held_back(stats: LoaderStats, unread: str | None, max_in_flight: int | None) -> str:
    if stats.waited_share <= _CALM:
        if _starts_long(stats):
            return "Apart from that the input pipeline is not the bottleneck."
        return "The trainer sets the pace: the input pipeline is not the bottleneck, and nothing needs to change."
    if unread is not None:
        return f"Nothing was read ahead, since {unread}."
    if not stats.bytes_per_s:
        return (
            "This process read nothing, so it cannot tell reading from decoding: workers read for themselves. Ask for "
            "dataset.manifest of a torchobj dataset before the loop, also where another dataset holds it, and this "
            "process reads for all of them."
            if stats.workers
            else "Nothing was read through the look-ahead, so reading cannot be told from decoding."
        )
    if stats.reading_share < _BY_READING * stats.waited_share:
        where = (
            f"its {stats.workers} workers do not decode fast enough: give it more, or a cheaper transform"
            if stats.workers
            else "the transform runs in the loop's own process: give the loader workers"
        )
        return f"Decoding holds it back: objects were waited for {stats.reading_share:.0%} of the time, and {where}."
    return _by_reading(stats, max_in_flight)


def _by_reading(stats: LoaderStats, max_in_flight: int | None) -> str:
    taken = stats.hits + stats.late + stats.queued + stats.misses
    if stats.throttled > _THROTTLED * (taken + stats.retries):
        return (
            f"The store holds it back: {stats.throttled} answers asked for fewer requests. Spread the keys over more "
            "prefixes, or read from fewer ranks at once; max_in_flight in StoreConfig bounds the requests of each."
        )
    if stats.misses > taken / 2:
        return (
            f"Objects were read when they were asked for, {stats.misses} of {taken} unannounced: the loop asks for "
            "others than its sampler yields."
        )
    return _budget(stats) if stats.starved_share >= max(stats.limited_share, 0.1) else _network(stats, max_in_flight)


def _budget(stats: LoaderStats) -> str:
    # Where sizes are not known what is ahead is a guess.
    trainer = max(0, stats.used_bytes - stats.granted_bytes - stats.ahead_bytes)
    if trainer > stats.budget_bytes / 2:
        change = f"this process keeps {_size(trainer)} of batches: let go of them, or copy them; else"
    elif stats.granted_bytes > stats.budget_bytes / 2:
        change = "workers hold most of it: fewer of them, or a smaller prefetch_factor, leave more, and so does"
    else:
        change = "more lets it read further ahead:"
    return (
        f"The budget of {_size(stats.budget_bytes)} holds it back: {stats.starved_share:.0%} of the reads that ended "
        f"left no memory for the next; {change} torchobj.set_budget(bytes), or TORCHOBJ_BUDGET_BYTES."
    )


def _network(stats: LoaderStats, max_in_flight: int | None) -> str:
    times = (
        f"half of the answers began within {_time(stats.first_byte_p50_s)}, and all but one in a hundred within "
        f"{_time(stats.first_byte_p99_s)}"
    )
    change = (
        f"max_in_flight={max_in_flight} in StoreConfig was the limit: a higher one, or 'auto', may help"
        if stats.limited_share > 0.5 and max_in_flight is not None
        else "what helps is a bucket in the same region, or more bandwidth to it"
    )
    return f"The network, or the store, holds it back: {times}; {change}."


def _besides(stats: LoaderStats) -> list[str]:
    said = []
    if stats.failed_samples:
        said.append(f"{stats.failed_samples} samples could not be read or made, and were replaced or skipped.")
    if stats.failed:
        said.append(f"{stats.failed} reads failed for good.")
    if stats.overdrawn:
        said.append(f"The budget was exceeded {stats.overdrawn} times for a batch that was waited for.")
    if stats.retries:
        said.append(f"{stats.retries} requests failed, and were made again.")
    if stats.connect_failures:
        said.append(f"{stats.connect_failures} times no connection could be made.")
    if stats.hedges_won:
        said.append(f"{stats.hedges_won} slow answers were overtaken by a second request.")
    return said


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1000:.1f} ms"
