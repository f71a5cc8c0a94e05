"""Commands that prepare datasets: `torchobj manifest`, `torchobj index` and `torchobj pack`.

`torchobj.manifest` and `torchobj.shards` list the objects, read the headers of shards, and plan and write shards.
"""

import time
from typing import Any

import click
from typing_extensions import override

from torchobj.cli.options import Command, CommandError, Settings, settings, shared_options
from torchobj.cli.output import counted, duration, human_size, print_json, rate_shown, rows, shown
from torchobj.cli.progress import reporting
from torchobj.cli.targets import URL, Target, parse_target, raw_option
from torchobj.cli.transfer_run import FailedTransfer
from torchobj.config import StoreConfig
from torchobj.manifest import Manifest
from torchobj.shards import TarIndex, index_file
from torchobj.shards.packing import Packing, PackPlan, PlannedShard, check_next, is_below, plan_shards
from torchobj.shards.shard_urls import shard_manifest
from torchobj.urls import Url


@click.group(params=shared_options(), short_help="Manifest files: build, show.")
def manifest() -> None:
    """Builds and shows manifest files: the objects of a dataset with their sizes and versions, as Parquet."""


@manifest.command(cls=Command)
@click.argument("url", type=URL)
@click.argument("file", type=URL)
@click.option("--suffix", "suffixes", metavar="TEXT", multiple=True, help="Only keys that end with it; repeatable.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of objects, the first in key order.")
@raw_option
def build(url: str, file: str, *, suffixes: tuple[str, ...], limit: int | None, raw: bool) -> None:
    """Lists the objects under URL, whose keys are compared as by `ls`, and writes the manifest FILE, a path or URL.

    `ObjectMapDataset.from_manifest` reads its objects without a listing.
    """
    chosen, target = settings(), parse_target(url, raw=raw)
    config = chosen.config(url, file)
    whole = target.folder() if target.is_local and target.names_folder else target
    built = Manifest.from_prefix(str(whole.url), glob=target.glob, suffixes=list(suffixes), limit=limit, config=config)
    if len(built) == 0:
        raise target.nothing()
    built.save(str(parse_target(file, raw=True).url), config=config)
    _summary(built, file)


@manifest.command(cls=Command)
@click.argument("file", type=URL)
@click.option("--list", "is_listed", is_flag=True, help="Print its objects: size and URL.")
def show(file: str, *, is_listed: bool) -> None:
    """Shows the number of objects, their size and the digest of the manifest FILE, a path or URL."""
    loaded = Manifest.load(str(parse_target(file, raw=True).url), config=settings().config(file))
    if not is_listed:
        _summary(loaded, file)
        return
    for index in range(len(loaded)):
        _, _, size, version = loaded.entry(index)
        fields = {"url": loaded.url(index), "size": size, "version": version}
        fields = {name: value for name, value in fields.items() if value is not None}
        settings().show(fields, f"{human_size(size):>10}  {shown(loaded.url(index))}")


def _summary(found: Manifest, file: str) -> None:
    sizes = [found.entry(index)[2] for index in range(len(found))]
    total, unknown = sum(size or 0 for size in sizes), sizes.count(None)
    fields = {"file": file, "objects": len(found), "bytes": total}
    fields |= {"unknown_sizes": unknown, "stores": found.bases(), "digest": found.digest()}
    if settings().json:
        print_json(fields)
        return
    size = f"{total} ({human_size(total)})" + (f", {unknown} objects of unknown size" if unknown else "")
    table = [("file", shown(file)), ("objects", str(len(found))), ("bytes", size)]
    rows([*table, ("stores", " ".join(map(shown, found.bases()))), ("digest", found.digest())])


@click.command(cls=Command, short_help="Index tar shards for random access.")
@click.argument("shards", nargs=-1, required=True, type=URL)
@click.option("-o", "--output", "file", metavar="FILE", type=URL, help="One index of all shards, a path or URL.")
def index(shards: tuple[str, ...], *, file: str | None) -> None:
    """Writes an index beside each of SHARDS that has none, or one for another size or version.

    SHARDS are URLs, patterns with braces or wildcards, or prefixes that end with a slash. Only headers are read.
    `TarMapDataset` reads the samples in any order by their index.
    """
    chosen = settings()
    index_file.check_installed()
    urls = [str(parse_target(text, raw=True).url) for text in shards]
    config = chosen.config(*shards, *([] if file is None else [file]))
    started = time.monotonic()
    manifest = shard_manifest(urls, config)
    with reporting("index", quiet=chosen.json) as report:
        if file is None:
            written = TarIndex.update_per_shard(manifest, config=config, progress=report)
        else:
            target = str(parse_target(file, raw=True).url)
            TarIndex.load_or_build(manifest, config=config, progress=report).save(target, config=config)
            written = [target]
    files = f"{len(written)} files" if len(written) != 1 else shown(written[0])
    text = f"{len(manifest)} shards: wrote {files} in {duration(time.monotonic() - started)}"
    chosen.show({"shards": len(manifest), "written": written}, text)


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
@raw_option
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
    check_next(plan, pattern, start_shard, config)
    if plan.left_out and not chosen.json:
        chosen.note(_left_out(plan))
    selected = [shard for shard in plan.shards if shard.number % part[1] == part[0]]
    if dry_run:
        for shard in selected:
            _print_planned(chosen, shard)
        return
    started = time.monotonic()
    with reporting("pack", quiet=chosen.json or check) as report:
        packing = (_Checking if check else Packing)(plan, selected, config, report)
        packing.run(parallel)
    _print_outcome(chosen, plan, packing, time.monotonic() - started)
    if packing.failures:
        raise click.exceptions.Exit(1)


def _objects(target: Target, pattern: str, manifest: str | None, config: StoreConfig) -> tuple[Manifest, Url]:
    """The objects to pack, and the folder to which their names are relative."""
    if manifest is None:
        whole = target if target.glob is not None else target.folder()
        if target.glob is None and is_below(pattern, whole.url):
            raise CommandError(
                f"{pattern}: is below {whole.shown}, so that the next listing would contain the shards; name another "
                "folder, or select the objects by wildcards or --manifest"
            )
        listed = Manifest.from_prefix(str(whole.url), glob=whole.glob, config=config)
        return listed, whole.url._replace(key=whole.url.key[: whole.url.key.rfind("/") + 1])
    if target.glob is not None:
        raise CommandError(f"{target.text}: must have no wildcards with --manifest; --raw takes them as they are")
    return Manifest.load(str(parse_target(manifest, raw=True).url), config=config), target.folder().url


def _left_out(plan: PackPlan) -> str:
    count, first = len(plan.left_out), plan.manifest.url(plan.left_out[0])
    noun = "object is" if count == 1 else "objects are"
    return f"{count} {noun} left out, whose names have no extension or begin with a dot: {shown(first)}"


class _Checking(Packing):
    """Compares shards with the plan."""

    @override
    def write(self, shard: PlannedShard) -> None:
        """Raises instead."""
        raise CommandError(f"{shard.url}: is missing, or does not contain the objects of the plan; pack it")


def _print_planned(chosen: Settings, shard: PlannedShard) -> None:
    fields = {"url": shard.url, "samples": shard.samples, "files": len(shard.objects), "bytes": shard.bytes}
    contents = f"{shard.samples} samples, {len(shard.objects)} files, {human_size(shard.bytes)}"
    chosen.show({"action": "would pack", **fields}, f"would pack {shown(shard.url)}: {contents}")


def _print_outcome(chosen: Settings, plan: PackPlan, packing: Packing, elapsed_s: float) -> None:
    """Prints the failures and a summary."""
    for url, error in sorted(packing.failures, key=lambda failure: failure[0]):
        chosen.error(str(FailedTransfer(url, error)), error)
    packed, complete, failed = packing.packed, len(packing.complete), len(packing.failures)
    fields: dict[str, Any]
    if isinstance(packing, _Checking):
        fields = {"action": "checked", "shards": complete + failed}
        text = f"checked {counted(complete + failed, 'shard')}, in {duration(elapsed_s)}: {complete} complete"
    else:
        samples, size = sum(shard.samples for shard in packed), sum(shard.bytes for shard in packed)
        files = sum(len(shard.objects) for shard in packed)
        fields = {"action": "packed", "shards": len(packed), "samples": samples, "files": files, "bytes": size}
        text = f"packed {counted(len(packed), 'shard')}: {samples} samples, {files} files, "
        text += rate_shown(size, elapsed_s) + (f"; {complete} were complete" if complete else "")
    fields |= {"complete": complete, "left_out": len(plan.left_out), "failed": failed, "seconds": round(elapsed_s, 3)}
    chosen.show(fields, text + (f"; {failed} failed" if failed else ""))
