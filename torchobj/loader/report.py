"""What held a loader back, in words, from its numbers. Measures nothing."""

from torchobj.loader.stats import LoaderStats

__all__ = ["report"]

#: Below this share of waiting nothing is worth changing.
_CALM = 0.05
#: So many answers of a hundred that ask for fewer requests make the store the limit.
_THROTTLED = 0.02
#: So many objects of a hundred in memory when they are asked for, and reading is not what is waited for.
_READ_IN_TIME = 0.9


def report(stats: LoaderStats) -> str:
    """One paragraph: what was done, what held it back, and what to change."""
    if not stats.batches:
        return "Nothing was handed out yet."
    return " ".join([_done(stats), _held_back(stats), *_besides(stats)])


def _done(stats: LoaderStats) -> str:
    return (
        f"{stats.samples} samples in {stats.elapsed_s:.1f} s: {stats.samples_per_s:.0f} a second, "
        f"{stats.bytes_per_s / 1e6:.1f} MB/s from the store; the loop waited {stats.waited_share:.0%} of the time."
    )


def _held_back(stats: LoaderStats) -> str:
    if stats.waited_share <= _CALM:
        return "The trainer sets the pace: reading keeps up with it, and nothing needs to change."
    taken = stats.hits + stats.late + stats.queued + stats.misses
    if not taken:
        return "Nothing was read ahead: the dataset reads nothing by torchobj, or its objects lie in no store."
    if stats.throttled > _THROTTLED * (taken + stats.retries):
        return (
            f"The store holds it back: {stats.throttled} answers asked for fewer requests. Spread the keys over more "
            "prefixes, or read from fewer ranks at once; max_in_flight in StoreConfig bounds the requests of each."
        )
    return _within(stats, taken)


def _within(stats: LoaderStats, taken: int) -> str:
    if stats.misses > taken / 2:
        return (
            f"Objects were read when they were asked for, {stats.misses} of {taken} unannounced: use "
            "torchobj.DataLoader, torchobj.attach(loader) for a loader that something else builds, or a lookahead "
            "that is not 0."
        )
    if stats.hits >= _READ_IN_TIME * taken:
        where = (
            f"its {stats.workers} workers do not decode fast enough: give it more, or a cheaper transform"
            if stats.workers
            else "the transform runs in the loop's own process: give the loader workers"
        )
        return f"Decoding holds it back: {stats.hits / taken:.0%} of the objects were in memory in time, and {where}."
    return _budget(stats) if stats.starved_share >= max(stats.limited_share, 0.1) else _network(stats)


def _budget(stats: LoaderStats) -> str:
    change = (
        "workers hold most of it: fewer of them, or a smaller prefetch_factor, leave more, and so does"
        if stats.granted_bytes > stats.budget_bytes / 2
        else "more lets it read further ahead:"
    )
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
    if stats.failed:
        said.append(f"{stats.failed} reads failed for good.")
    if stats.overdrawn:
        said.append(f"The budget was exceeded {stats.overdrawn} times for a batch that was waited for.")
    if stats.retries or stats.hedges:
        said.append(
            f"{stats.retries} requests were made again; {stats.hedges} were made twice for slowness, and the second "
            f"was the first to answer {stats.hedges_won} times."
        )
    return said


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1000:.1f} ms"
