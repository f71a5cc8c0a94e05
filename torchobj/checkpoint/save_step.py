"""Saves one step: writes its data, commits it, and deletes old steps. The manager decides when, and on which thread.

A save that fails deletes what it wrote, unless its commit may have succeeded: then the data stays, and is either the
step's or a leftover.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import torch

from torchobj.checkpoint import leftovers
from torchobj.checkpoint.commit_format import Attempt, Commit, Kind, StoredObject
from torchobj.checkpoint.commits import Commits, CommittedByAnotherError, UnreadableCommitError
from torchobj.checkpoint.ranks import RankGoneError, Ranks
from torchobj.checkpoint.retention import Retention, doomed
from torchobj.checkpoint.save import save
from torchobj.checkpoint.server import was_refused
from torchobj.checkpoint.staging import Stager, Watch
from torchobj.checkpoint.state import State
from torchobj.checkpoint.state_shards import save_shards
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    TorchobjError,
)

__all__ = ["STATE_FILE", "Beginning", "begin", "checked_metrics", "file_writer", "run", "shard_writer"]

logger = logging.getLogger("torchobj")

#: The only object of a state that the first rank saves.
STATE_FILE = "state.pt"


class Beginning(NamedTuple):
    """An attempt at a step."""

    attempt: Attempt
    replaced: Commit | None
    """The existing commit of the step, which will be replaced."""
    version: str | None
    """The version of its commit object."""


def begin(commits: Commits, step: int, *, overwrite: bool) -> Beginning:
    """Returns a new attempt at a step.

    Raises:
        CheckpointError: The step is committed, and `overwrite` is False.
        StoreError: The commit object cannot be read.
    """
    found = commits.find(step)
    if found is None:
        return Beginning(Attempt.new(step), None, None)
    if not overwrite:
        raise CheckpointError(f"{commits.url}: step {step} is committed already; overwrite=True replaces it")
    try:
        replaced = commits.read(step, found)
    except (ObjectChangedError, ObjectNotFoundError) as error:
        message = (
            f"step {step} was deleted while it was being replaced, or was saved by another process; save it once more"
        )
        raise CheckpointError(f"{commits.url}: {message}") from error
    except UnreadableCommitError as error:
        logger.warning("replaced; the data of the old step is left for sweep(): %s", error)
        replaced = None
    return Beginning(Attempt.new(step), replaced, found.version)


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns the metrics as numbers by name.

    Raises:
        ConfigError: A metric is not a number.
    """
    try:
        return {str(name): _number(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"metrics={metrics!r}: must be numbers by name: {error}") from error


def _number(value: Any) -> float:
    # float() of a tensor that requires grad, such as a loss, would warn.
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def file_writer(
    taken: State, url: str, config: StoreConfig, stager: Stager, *, stage: bool | None
) -> Callable[[], object]:
    """Returns the function that writes a state as one file.

    Args:
        taken: The state.
        url: URL of the file.
        config: How its store is reached.
        stager: Makes the staged copy.
        stage: True writes a staged copy; False the state itself, with a watch on its tensors; None the state itself,
            which the caller does not change.
    """
    taken.check_unsharded()
    taken.check_values()
    if stage is not False:
        tree = stager.stage(taken.tree) if stage else taken.tree
        return lambda: save(tree, url, config=config)
    watch = Watch(taken.tree, taken.tensors)

    def write() -> None:
        try:
            save(watch.state, url, config=config)
        except Exception:
            # A changed tensor no longer matches its checksum: then the store's error is not the cause.
            watch.check()
            raise
        watch.check()

    return write


def shard_writer(
    taken: State, folder: str, config: StoreConfig, ranks: Ranks, stager: Stager, *, stage: bool | None
) -> Callable[[], object]:
    """Returns the function that writes this rank's state shard to a folder: a staged copy of it if `stage`.

    Raises:
        ConfigError: `stage` is False.
    """
    if stage is False:
        raise ConfigError("stage=False: a sharded state is always copied first")
    taken.check_values()
    tree = stager.stage_shard(taken.tree) if stage else taken.tree
    group = ranks.group
    return lambda: save_shards(tree, folder, config, group)


def run(
    commits: Commits,
    rules: Retention,
    beginning: Beginning,
    kind: Kind,
    write: Callable[[], object],
    *,
    metrics: dict[str, float],
    ranks: Ranks,
) -> None:
    """Writes the data, commits it, and deletes steps that no rule keeps; with one outcome on all ranks.

    Args:
        commits: The commit objects of the manager.
        rules: The rules of the manager.
        beginning: The attempt.
        kind: What `write` writes.
        write: Called on every rank for state shards, otherwise on the first rank.
        metrics: Numbers by name.
        ranks: The ranks that save.

    Raises:
        Exception: The step was not committed.
        RankGoneError: Another rank does not respond; not raised on the first rank if the step is committed.
    """
    error: BaseException | None = None
    is_committed, step = False, beginning.attempt.step
    try:
        if ranks.is_first:
            _commit(commits, beginning, kind, write, metrics)
            is_committed = True
            _delete_old(commits, rules, beginning)
            _sweep(commits, beginning.attempt)
        elif kind == "dcp":
            write()
    except BaseException as caught:  # noqa: BLE001  all ranks raise it
        error = caught
    try:
        ranks.agree(error)
    except RankGoneError as gone:
        if not is_committed:
            unknown = f"it is not known whether step {step} was committed: call steps()"
            gone.add_note(f"step {step} was not committed" if ranks.is_first else unknown)
            raise
        logger.warning("%s: step %d is committed, but %s", commits.url, step, gone)
    except BaseException as failed:
        if is_committed:
            failed.add_note(f"step {step} is committed nevertheless")
        raise


def _commit(
    commits: Commits, beginning: Beginning, kind: Kind, write: Callable[[], object], metrics: dict[str, float]
) -> None:
    attempt = beginning.attempt
    with leftovers.under_way(attempt):
        try:
            written = write()
            crc32s = cast("dict[str, int | None]", written) if kind == "dcp" else {STATE_FILE: None}
            commit = Commit(attempt, kind, _written(commits, attempt, crc32s), metrics, datetime.now(tz=UTC))
            try:
                # A commit object that cannot be read again would be a step that can never be restored.
                Commit.from_json(commit.to_json(), commit.step)
            except ValueError as error:
                raise CheckpointError(f"{commits.url}: step {commit.step} cannot be committed: {error}") from error
        except Exception as error:
            if getattr(error, "code", None) == "NoSuchUpload":
                error.add_note("another process aborted the upload: did it call sweep with too small an age?")
            _discard(commits, attempt)
            raise
        try:
            commits.publish(commit, beginning.version)
        except (StoreError, CommittedByAnotherError) as error:
            if isinstance(error, CommittedByAnotherError) or was_refused(error):
                _discard(commits, attempt)
            raise


def _written(commits: Commits, attempt: Attempt, crc32s: Mapping[str, int | None]) -> tuple[StoredObject, ...]:
    """Returns the attempt's objects. All of them belong to it, because its nonce is unique.

    Args:
        commits: The commit objects of the manager.
        attempt: The attempt.
        crc32s: The objects that were written, by name, with the CRC-32 of those that have one.

    Raises:
        CheckpointError: An object is missing.
    """
    # Without markers of folders, and other keys that a commit cannot name.
    found = {
        info.key.removeprefix(attempt.folder): info
        for info in commits.objects(attempt.folder)
        if Attempt.of_key(info.key) == attempt
    }
    missing = sorted(crc32s.keys() - found.keys())
    if missing:
        message = f"step {attempt.step}: {', '.join(missing)} is gone; did another process call sweep?"
        raise CheckpointError(f"{commits.url}: {message}")
    # Listings may have no sizes.
    sizes = {
        name: commits.store.head(commits.key(info.key)).size if info.size is None else info.size
        for name, info in found.items()
    }
    return tuple(
        StoredObject(info.key, sizes[name] or 0, info.version, crc32s.get(name)) for name, info in found.items()
    )


def _discard(commits: Commits, attempt: Attempt) -> None:
    try:
        commits.delete_objects(info.key for info in commits.objects(attempt.folder))
    except TorchobjError as error:
        logger.warning("the data of step %d is left for sweep(): %s", attempt.step, error)


def _delete_old(commits: Commits, rules: Retention, beginning: Beginning) -> None:
    """Deletes the replaced step and the steps that no rule keeps. Failures are only logged: the step is saved."""
    saved = beginning.attempt.step
    try:
        if beginning.replaced is not None:
            commits.delete_objects(item.key for item in beginning.replaced.objects)
        committed = commits.readable()
        _warn(commits, rules, committed, saved)
        old = set(doomed(committed, rules, {saved, *leftovers.steps_under_way()}))
        for commit in committed:
            if commit.step in old:
                _delete(commits, commit)
        commits.point()
    except TorchobjError as error:
        logger.warning("%s: step %d is saved, but old steps were not deleted: %s", commits.url, saved, error)
        if isinstance(error, AccessDeniedError) and error.operation == "delete":
            permission = "storage.objects.delete" if commits.url.startswith("gs://") else "s3:DeleteObject"
            commits.warn_once(f"{commits.url}: to delete old steps, grant {permission}; keep_last=None keeps all steps")


def _sweep(commits: Commits, attempt: Attempt) -> None:
    """Deletes what killed saves left. Failures are only logged: the step is saved."""
    try:
        for item in leftovers.sweep_expired(commits, attempt):
            logger.info("%s: deleted %s, which a save of step %d left", commits.url, item.key, item.step)
    except TorchobjError as error:
        commits.warn_once(f"{commits.url}: what killed saves left was not deleted: {error}")


def _delete(commits: Commits, commit: Commit) -> None:
    try:
        commits.delete(commit, commits.known_version(commit.step))
    except CommittedByAnotherError as error:
        # Saved again or deleted by another process.
        logger.warning("%s", error)
    else:
        logger.info("%s: deleted step %d: no rule keeps it", commits.url, commit.step)


def _warn(commits: Commits, rules: Retention, committed: list[Commit], saved: int) -> None:
    above = [commit.step for commit in committed if commit.step > saved]
    if above:
        message = (
            "%s: step %d is saved, but the latest step is still %d; to give up later steps, delete(step) each of %s"
        )
        logger.warning(message, commits.url, saved, above[-1], above)
    best = rules.keep_best
    if best is not None and any(commit.step == saved and best.metric not in commit.metrics for commit in committed):
        commits.warn_once(f"{commits.url}: a step was saved without the metric {best.metric!r} of keep_best")
