"""`torchobj checkpoints`: the steps of a `CheckpointManager` or of `FolderCheckpoints`.

Imports no torch: it reads commit objects only.
"""

import math
from typing import Any

import click

from torchobj.checkpoint.leftovers import Leftover
from torchobj.checkpoint.steps.commit import Commit, Kind
from torchobj.checkpoint.steps.commits import Commits
from torchobj.cli.options import Command, CommandError, Settings, age_option, settings, shared_options, yes_option
from torchobj.cli.output import counted, human_size, print_line, shown, time_shown
from torchobj.cli.removing import confirm
from torchobj.cli.targets import URL, parse_target

#: What a step is, in a row of text.
_KINDS: dict[Kind, str] = {"state": "one file", "dcp": "sharded", "folder": "folder"}


@click.group(
    params=shared_options(), short_help="Checkpoints by step: steps, latest, metrics, leftovers, sweep, delete."
)
def checkpoints() -> None:
    """Shows and deletes checkpoints by step, of `CheckpointManager` and `FolderCheckpoints`, and what interrupted saves
    left.
    """


def _commits(url: str) -> Commits:
    target = parse_target(url, raw=True)
    return Commits(str(target.url).rstrip("/"), settings().config(url))


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
def steps(url: str) -> None:
    """Lists the committed steps of the folder at URL: step, time of the commit, kind, objects, size and metrics."""
    chosen, commits = settings(), _commits(url)
    known = {commit.step: commit for commit in commits.readable()}
    # A commit object that cannot be read was logged; its step is committed nevertheless.
    committed = sorted(commits.versions())
    if not committed:
        raise _none(commits)
    for step in committed:
        commit = known.get(step)
        fields = {"step": step} if commit is None else _fields(commit)
        chosen.show(fields, f"{step:>12}  " + ("commit object cannot be read" if commit is None else _row(commit)))


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
def latest(url: str) -> None:
    """Prints the latest committed step of the folder at URL: the one with the largest number."""
    commits = _commits(url)
    step = max(commits.versions(), default=None)
    if step is None:
        raise _none(commits)
    settings().show({"step": step}, str(step))


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
@click.argument("step", type=click.IntRange(min=0), required=False)
def metrics(url: str, step: int | None) -> None:
    """Prints the metrics of STEP, or of all steps, of the folder at URL."""
    chosen, commits = settings(), _commits(url)
    found = [commit for commit in commits.readable() if step in (None, commit.step)]
    if not found:
        raise (_none(commits) if step is None else _not_committed(commits, step))
    for commit in found:
        chosen.show({"step": commit.step, "metrics": _numbers(commit)}, f"{commit.step:>12}  {_metrics(commit)}")


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
def leftovers(url: str) -> None:
    """Lists data of saves that were interrupted, and of running ones: time, size, step and key."""
    for item in _commits(url).leftovers():
        _report(settings(), item, "leftover")


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
@click.option(
    "--older-than",
    metavar="AGE",
    default="1h",
    show_default=True,
    callback=age_option,
    help="Delete only those of saves that wrote nothing for this time, by the clock of the store.",
)
@yes_option
def sweep(url: str, *, older_than: float, yes: bool) -> None:
    """Deletes the leftovers of interrupted saves, which `leftovers` lists."""
    commits = _commits(url)
    found = commits.leftovers()
    if found and not yes:
        confirm(f"delete old ones of {len(found)} leftovers of {commits.url}?", "--yes deletes without a question")
    chosen, swept = settings(), commits.sweep_idle(older_than)
    for item in swept:
        _report(chosen, item, "delete")
    if not swept and not chosen.json:
        print_line("nothing to do")


@checkpoints.command(cls=Command)
@click.argument("url", type=URL)
@click.argument("steps", type=click.IntRange(min=0), nargs=-1, required=True)
@yes_option
@click.option("--dry-run", is_flag=True, help="Print what would be deleted.")
def delete(url: str, steps: tuple[int, ...], *, yes: bool, dry_run: bool) -> None:
    """Deletes committed STEPS of the folder at URL, after a question: none if one of them is not committed."""
    commits, chosen = _commits(url), settings()
    committed = commits.versions()
    for step in steps:
        if step not in committed:
            raise _not_committed(commits, step)
    if not yes and not dry_run:
        names = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} of {len(committed)} steps"
        confirm(f"delete {names} of {commits.url}?", "--yes deletes without a question")
    for step in dict.fromkeys(steps):
        if not dry_run:
            commits.delete_step(step)
        action = "would delete" if dry_run else "delete"
        chosen.show({"action": action, "step": step}, f"{action} step {step}")


def _none(commits: Commits) -> CommandError:
    return CommandError(
        f"{commits.url}: no step is committed; URL must be that of a CheckpointManager or FolderCheckpoints"
    )


def _not_committed(commits: Commits, step: int) -> CommandError:
    return CommandError(f"{commits.url}: step {step} is not committed; `torchobj checkpoints steps` lists the steps")


def _numbers(commit: Commit) -> dict[str, float | str]:
    # JSON has no infinite numbers and no NaN.
    return {name: value if math.isfinite(value) else str(value) for name, value in commit.metrics.items()}


def _metrics(commit: Commit) -> str:
    return " ".join(f"{shown(name)}={value:g}" for name, value in sorted(commit.metrics.items()))


def _row(commit: Commit) -> str:
    size = human_size(sum(item.size for item in commit.objects))
    kind = _KINDS[commit.kind]
    objects = counted(len(commit.objects), "file" if commit.kind == "folder" else "object")
    return f"{time_shown(commit.time)}  {kind:<8}  {objects:>12}  {size:>10}  {_metrics(commit)}".rstrip()


def _fields(commit: Commit) -> dict[str, Any]:
    return {
        "step": commit.step,
        "time": commit.time.isoformat(),
        "kind": commit.kind,
        "sharded": commit.kind == "dcp",
        "objects": len(commit.objects),
        "bytes": sum(item.size for item in commit.objects),
        "metrics": _numbers(commit),
    }


def _report(chosen: Settings, item: Leftover, action: str) -> None:
    modified = None if item.modified is None else item.modified.isoformat()
    is_upload = item.upload is not None
    fields = {"key": item.key, "step": item.step, "size": item.size, "modified": modified, "upload": is_upload}
    size = "upload" if is_upload else human_size(item.size)
    text = f"{action}  {time_shown(item.modified)}  {size:>10}  step {item.step}  {shown(item.key)}"
    chosen.show({"action": action, **fields}, text)
