"""What held a loader back, in words, from its numbers. Measures nothing."""

from torchobj.loader.stats import LoaderStats

__all__ = ["report"]

#: Below this share of waiting nothing is worth changing.
_CALM = 0.05
#: So many answers of a hundred that ask for fewer requests make the store the limit.
_THROTTLED = 0.02
#: Of the share that the loop waits, what waiting for objects must be for reading to be the cause.
_BY_READING = 0.5


def report(stats: LoaderStats, unread: str | None = None) -> str:
    """One paragraph: what was done, what held it back, and what to change.

    `unread` says why nothing is read ahead, where that is so.
    """
    if not stats.batches:
        return "Nothing was handed out yet."
    return " ".join([_done(stats), _held_back(stats, unread), *_besides(stats)])


def _done(stats: LoaderStats) -> str:
    return (
        f"{stats.samples} samples in {stats.elapsed_s:.1f} s: {stats.samples_per_s:.0f} a second, "
        f"{stats.bytes_per_s / 1e6:.1f} MB/s from the store; the loop waited {stats.waited_share:.0%} of the time."
    )


def _held_back(stats: LoaderStats, unread: str | None) -> str:
    if stats.waited_share <= _CALM:
        return "The trainer sets the pace: reading keeps up with it, and nothing needs to change."
    if unread is not None:
        return f"Nothing was read ahead, since {unread}."
    if stats.reading_share < _BY_READING * stats.waited_share:
        where = (
            f"its {stats.workers} workers do not decode fast enough: give it more, or a cheaper transform"
            if stats.workers
            else "the transform runs in the loop's own process: give the loader workers"
        )
        return f"Decoding holds it back: objects were waited for {stats.reading_share:.0%} of the time, and {where}."
    return _by_reading(stats)


def _by_reading(stats: LoaderStats) -> str:
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
    return _budget(stats) if stats.starved_share >= max(stats.limited_share, 0.1) else _network(stats)


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


def _network(stats: LoaderStats) -> str:
    times = (
        f"half of the answers began within {_time(stats.first_byte_p50_s)}, and all but one in a hundred within "
        f"{_time(stats.first_byte_p99_s)}"
    )
    change = (
        f"{stats.in_flight_limit} requests at a time were the limit: a higher max_in_flight in StoreConfig may help"
        if stats.limited_share > 0.5
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
