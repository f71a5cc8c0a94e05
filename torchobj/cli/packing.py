"""`torchobj pack`: packs objects into tar shards, several at once. `torchobj.shards.packing` plans and writes them."""

import dataclasses
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import click

from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, Settings, fail_with, settings
from torchobj.cli.output import duration, human_size, print_json, print_line, shown
from torchobj.cli.progress import Report, reporting
from torchobj.cli.targets import Target, parse_target
from torchobj.cli.transfer_run import Failure, failure_line
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.manifest import Manifest
from torchobj.shards import index_file
from torchobj.shards.packing import PackPlan, PlannedShard, Stopped, is_complete, pack_shard, plan_shards
from torchobj.shards.writer import shard_url
from torchobj.store import Store
from torchobj.store.transfers import Progress
from torchobj.urls import Url, parse_url

__all__ = ["pack"]

#: Time for which an interrupted command waits until its uploads are aborted.
_ABORT_LIMIT_S = 0.5


@dataclasses.dataclass
class _Outcome:
    """What was done with the shards of this host."""

    packed: list[PlannedShard] = dataclasses.field(default_factory=list)
    complete: list[PlannedShard] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)


def _part(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    number, _slash, count = value.partition("/")
    # Other digits than 0 to 9 are decimal too.
    if not (value.isascii() and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise click.BadParameter(f"{value!r}: must be I/N with 0 <= I < N, such as 0/2", param=parameter)
    return int(number), int(count)


@click.command(cls=Command, short_help="Pack objects into tar shards.")
@click.argument("prefix", type=URL)
@click.argument("shards", type=URL)
@click.option("--maxcount", type=click.IntRange(1), default=100_000, show_default=True, help="Samples of a shard.")
@click.option(
    "--maxsize", type=click.FloatRange(1), default=3e9, show_default=True, help="Bytes at which a shard ends."
)
@click.option("--start-shard", type=click.IntRange(0), default=0, show_default=True, help="Number of the first shard.")
@click.option(
    "--shard", "part", metavar="I/N", default="0/1", callback=_part, help="Pack only each Nth shard, from the Ith."
)
@click.option("--manifest", metavar="FILE", type=URL, help="Manifest of the objects, instead of a listing.")
@click.option("--parallel", type=click.IntRange(1, 64), default=4, show_default=True, help="Shards at the same time.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a shard is missing or not that of the plan.")
@click.option("--dry-run", is_flag=True, help="Print the shards that would be packed.")
@click.option("--raw", is_flag=True, help="Take wildcards in PREFIX as they are.")
def pack(
    prefix: str,
    shards: str,
    *,
    maxcount: int,
    maxsize: float,
    start_shard: int,
    part: tuple[int, int],
    manifest: str | None,
    parallel: int,
    check: bool,
    dry_run: bool,
    raw: bool,
) -> None:
    """Packs the objects in the folder PREFIX into tar shards of the format of webdataset, with an index beside each.

    Objects with the same name up to the first dot are a sample. SHARDS is a URL with the number of the shard, such as
    s3://bucket/train-%06d.tar. Which objects are in which shard depends on the listing only: a repeated command skips
    complete shards, and hosts with the same --manifest divide them by --shard I/N. Each shard is verified.
    """
    chosen = settings()
    index_file.check_installed()
    target = parse_target(prefix, raw=raw)
    config = chosen.config(*(text for text in (prefix, shards, manifest) if text is not None))
    pattern = str(parse_target(shards, raw=True).url)
    objects, folder = _objects(target, pattern, manifest, config)
    plan = plan_shards(objects, folder, pattern, maxcount=maxcount, maxsize=maxsize, start_shard=start_shard)
    if not plan.shards:
        raise CommandError(f"{prefix}: no samples; {_left_out(plan)}") if plan.left_out else target.nothing()
    _check_next(plan, pattern, start_shard, config)
    if plan.left_out and not chosen.json:
        chosen.note(_left_out(plan))
    selected = [shard for shard in plan.shards if shard.number % part[1] == part[0]]
    if dry_run:
        for shard in selected:
            _print_planned(chosen, shard)
        return
    started = time.monotonic()
    with reporting("pack", quiet=chosen.json or check) as report:
        outcome = _Packing(plan, config, report, check=check).run(selected, parallel)
    _print_outcome(chosen, plan, outcome, time.monotonic() - started)


def _objects(target: Target, pattern: str, manifest: str | None, config: StoreConfig) -> tuple[Manifest, Url]:
    """The objects to pack, and the folder to which their names are relative."""
    if manifest is None:
        whole = target if target.glob is not None else target.folder()
        if target.glob is None and pattern.startswith(str(whole.url)):
            raise CommandError(
                f"{pattern}: is below {whole.shown}, so that the next listing would contain the shards; name another "
                "folder, or select the objects by wildcards or --manifest"
            )
        listed = Manifest.from_prefix(str(whole.url), glob=whole.glob, config=config)
        return listed, whole.url._replace(key=whole.url.key[: whole.url.key.rfind("/") + 1])
    if target.glob is not None:
        raise CommandError(f"{target.text}: must have no wildcards with --manifest; --raw takes them as they are")
    return Manifest.load(str(parse_target(manifest, raw=True).url), config=config), target.folder().url


def _check_next(plan: PackPlan, pattern: str, start_shard: int, config: StoreConfig) -> None:
    """Checks that there is no shard after those of the plan, which readers would read with them."""
    url = parse_url(shard_url(pattern, start_shard + len(plan.shards)))
    if Store(url.base, config=config).exists(url.key):
        raise CommandError(
            f"{url}: exists, but the plan has {len(plan.shards)} shards: it is of other objects or limits; delete it "
            "and those after it, or choose other names"
        )


def _left_out(plan: PackPlan) -> str:
    count, first = len(plan.left_out), plan.manifest.url(plan.left_out[0])
    noun = "object is" if count == 1 else "objects are"
    return f"{count} {noun} left out, whose names have no extension or begin with a dot: {shown(first)}"


class _Packing:
    """Packs shards at the same time, and adds up their progress."""

    def __init__(self, plan: PackPlan, config: StoreConfig, report: Report, *, check: bool) -> None:
        self._plan, self._config, self._report, self._only_checks = plan, config, report, check
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._files = self._bytes = self._skipped = 0
        self._total = (0, 0)

    def run(self, shards: list[PlannedShard], parallel: int) -> _Outcome:
        """Packs shards that are not complete. A failure does not end the others."""
        self._total = (sum(len(shard.objects) for shard in shards), sum(shard.bytes for shard in shards))
        outcome = _Outcome()
        pool = ThreadPoolExecutor(parallel)
        running: dict[Future[bool], PlannedShard] = {pool.submit(self._pack, shard): shard for shard in shards}
        try:
            while running:
                # Ctrl-C is raised within a tenth of a second.
                for future in wait(running, 0.1, FIRST_COMPLETED).done:
                    shard, error = running.pop(future), future.exception()
                    if error is not None:
                        outcome.failures.append(Failure(shard.url, error))
                    else:
                        (outcome.packed if future.result() else outcome.complete).append(shard)
        finally:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            wait(running, _ABORT_LIMIT_S)
        return outcome

    def _pack(self, shard: PlannedShard) -> bool:
        """Packs a shard unless it is complete. Returns whether it did."""
        if self._stopped.is_set():
            raise Stopped
        if is_complete(self._plan, shard, self._config):
            self._add(len(shard.objects), shard.bytes, len(shard.objects))
            return False
        if self._only_checks:
            raise CommandError(f"{shard.url}: is missing, or does not contain the objects of the plan; pack it")
        pack_shard(self._plan, shard, self._config, lambda size: self._add(1, size, 0), self._stopped)
        return True

    def _add(self, files: int, size: int, skipped: int) -> None:
        with self._lock:
            self._files, self._bytes, self._skipped = self._files + files, self._bytes + size, self._skipped + skipped
            self._report(Progress(self._files, self._total[0], self._bytes, self._total[1], self._skipped))


def _print_planned(chosen: Settings, shard: PlannedShard) -> None:
    if chosen.json:
        fields = {"url": shard.url, "samples": shard.samples, "files": len(shard.objects), "bytes": shard.bytes}
        print_json({"action": "would pack", **fields})
    else:
        size = human_size(shard.bytes)
        print_line(f"would pack {shown(shard.url)}: {shard.samples} samples, {len(shard.objects)} files, {size}")


def _print_outcome(chosen: Settings, plan: PackPlan, outcome: _Outcome, elapsed_s: float) -> None:
    """Prints the failures and a summary. Ends the command with exit code 1 if a shard is not complete."""
    for failure in sorted(outcome.failures, key=lambda failure: failure.name):
        chosen.error(failure_line(failure), failure.error)
    packed = outcome.packed
    fields: dict[str, Any] = {
        "action": "packed",
        "shards": len(packed),
        "samples": sum(shard.samples for shard in packed),
        "files": sum(len(shard.objects) for shard in packed),
        "bytes": sum(shard.bytes for shard in packed),
        "complete": len(outcome.complete),
        "left_out": len(plan.left_out),
        "failed": len(outcome.failures),
        "seconds": round(elapsed_s, 3),
    }
    if chosen.json:
        print_json(fields)
    else:
        noun = "shard" if len(packed) == 1 else "shards"
        rate = human_size(int(fields["bytes"] / elapsed_s)) if elapsed_s > 0 else "?"
        text = f"packed {len(packed)} {noun}: {fields['samples']} samples, {fields['files']} files, "
        text += f"{human_size(fields['bytes'])}, in {duration(elapsed_s)}, {rate}/s"
        text += f"; {len(outcome.complete)} were complete" if outcome.complete else ""
        print_line(text + (f"; {len(outcome.failures)} failed" if outcome.failures else ""))
    if outcome.failures:
        fail_with()
