"""One save: its data, its commit, and what goes afterwards. Leaves when it begins, and on which thread, to the manager.

A save that fails deletes what it wrote, unless its commit may have been made: then it stays, as step or leftover.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torchobj.checkpoint import admission, leftovers, sharded
from torchobj.checkpoint.commit_format import checked_step
from torchobj.checkpoint.commits import (
    Attempt,
    Commit,
    Commits,
    CommittedByAnotherError,
    Kind,
    StoredObject,
    UnreadableCommitError,
)
from torchobj.checkpoint.ranks import RankGoneError, Ranks
from torchobj.checkpoint.refusal import was_refused
from torchobj.checkpoint.retention import Retention, doomed
from torchobj.checkpoint.save import save
from torchobj.checkpoint.snapshot import Snapshots, Watch
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
from torchobj.store import ObjectInfo

__all__ = [
    "OF_ANOTHER_RANK",
    "STATE_FILE",
    "Beginning",
    "Data",
    "begun",
    "check_same",
    "checked_metrics",
    "run",
    "sharded_data",
    "whole_data",
]

logger = logging.getLogger("torchobj")

#: The one object of a state that the first rank saves.
STATE_FILE = "state.pt"


class Beginning(NamedTuple):
    """An attempt at a step."""

    attempt: Attempt
    replaced: Commit | None
    """The commit of the step that is there, and is to be replaced."""
    version: str | None
    """The version of its object."""


class Data(NamedTuple):
    """What an attempt writes."""

    kind: Kind
    write: Callable[[], object]
    """Writes it: called on every rank of a sharded state, else on the first."""
    check: Callable[[], None] | None = None
    """Raises where the state was changed while it was written."""


#: What the other ranks have of a state that the first one writes.
OF_ANOTHER_RANK = Data("state", lambda: None)


def begun(commits: Commits, step: int, *, overwrite: bool) -> Beginning:
    """A new attempt at a step.

    Raises:
        CheckpointError: The step is committed, and is not to be overwritten.
        StoreError: It cannot be found out.
    """
    version = commits.version(step)
    if version is None:
        return Beginning(Attempt.new(step), None, None)
    if not overwrite:
        raise CheckpointError(f"{commits.url}: step {step} is committed already; overwrite=True replaces it")
    try:
        replaced = commits.read(step, version)
    except (ObjectChangedError, ObjectNotFoundError) as error:
        message = f"step {step} was deleted while it was saved again, or saved by another; save it once more"
        raise CheckpointError(f"{commits.url}: {message}") from error
    except UnreadableCommitError as error:
        logger.warning("replaced, and what belonged to it is left for sweep(): %s", error)
        replaced = None
    return Beginning(Attempt.new(step), replaced, version)


def check_same(step: int, beginning: Beginning) -> None:
    """Raises where this rank was told to save another step.

    Raises:
        ConfigError: It was.
    """
    if checked_step(step) != beginning.attempt.step:
        raise ConfigError(f"step={step}: the first rank saves step {beginning.attempt.step}")


def checked_metrics(metrics: Any) -> dict[str, float]:
    """The metrics as numbers by name.

    Raises:
        ConfigError: They are none.
    """
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"metrics={metrics!r}: must be numbers by name: {error}") from error


def whole_data(
    taken: Mapping[str, Any], folder: str, config: StoreConfig, snapshots: Snapshots, *, stage: bool | None
) -> Data:
    """A state that was taken as one file: as it is (`stage` None: the caller waits), copied, or watched."""
    check = None
    admission.check_whole(taken)
    admission.warn_of_refused(taken)
    if stage is True:
        taken = snapshots.take(taken)
    elif stage is False:
        watch = Watch(taken)
        taken, check = watch.state, watch.check
    return Data("state", lambda: save(taken, folder + STATE_FILE, config=config), check)


def sharded_data(
    taken: Mapping[str, Any],
    folder: str,
    config: StoreConfig,
    ranks: Ranks,
    snapshots: Snapshots,
    *,
    stage: bool | None,
) -> Data:
    """A state that was taken as files of all ranks: as it is (`stage` None: the caller waits), or copied."""
    if stage is False:
        raise ConfigError("stage=False: a sharded state is always copied first")
    return Data("dcp", sharded.saving(taken, folder, config, ranks.group, snapshots if stage is True else None))


def run(
    commits: Commits,
    rules: Retention,
    beginning: Beginning,
    data: Data,
    *,
    metrics: dict[str, float],
    ranks: Ranks,
) -> None:
    """Writes, commits, and deletes what no rule keeps; with one outcome on all ranks.

    Raises:
        Exception: What kept it from being committed.
        RankGoneError: Another rank does not answer. Not on the first rank where it has committed: the step is there.
    """
    error: BaseException | None = None
    committed, step = False, beginning.attempt.step
    try:
        if ranks.is_first:
            _commit(commits, beginning, data, metrics)
            committed = True
            _tidy(commits, rules, beginning)
        elif data.kind == "dcp":
            data.write()
    except BaseException as caught:  # noqa: BLE001  all ranks raise it
        error = caught
    try:
        ranks.agree(error)
    except RankGoneError as gone:
        if not committed:
            gone.add_note(f"whether step {step} was committed is not known: steps() says so")
            raise
        logger.warning("%s: step %d is committed, but %s", commits.url, step, gone)
    except BaseException as failed:
        if committed:
            failed.add_note(f"step {step} is committed all the same")
        raise


def _commit(commits: Commits, beginning: Beginning, data: Data, metrics: dict[str, float]) -> None:
    attempt = beginning.attempt
    with leftovers.under_way(attempt):
        try:
            _write(data)
            commit = Commit(attempt, data.kind, _written(commits, attempt, data.kind), metrics, datetime.now(tz=UTC))
            _check_readable(commits, commit)
        except Exception as error:
            if getattr(error, "code", None) == "NoSuchUpload":
                error.add_note("the upload was aborted by somebody: did another process sweep with too low an age?")
            _discard(commits, attempt)
            raise
        try:
            commits.publish(commit, beginning.version)
        except (StoreError, CommittedByAnotherError) as error:
            if isinstance(error, CommittedByAnotherError) or was_refused(error):
                _discard(commits, attempt)
            raise


def _check_readable(commits: Commits, commit: Commit) -> None:
    """Raises where the commit object could not be read again: its step could never be restored.

    Raises:
        CheckpointError: It could not.
    """
    try:
        Commit.from_json(commit.to_json(), commit.step)
    except ValueError as error:
        raise CheckpointError(f"{commits.url}: step {commit.step} cannot be committed: {error}") from error


def _write(data: Data) -> None:
    try:
        data.write()
    except Exception:
        # What changed on the way does not fit its checksum either: that is the store's complaint, and no word for it.
        if data.check is not None:
            data.check()
        raise
    if data.check is not None:
        data.check()


def _written(commits: Commits, attempt: Attempt, kind: Kind) -> tuple[StoredObject, ...]:
    """The attempt's objects: all that a commit may name, as no other writes below its nonce.

    Raises:
        CheckpointError: One of them is not there.
    """
    crc32s: dict[str, int | None] = {STATE_FILE: None}
    if kind == "dcp":
        crc32s = sharded.checksums(f"{commits.url}/{attempt.folder}", commits.store.config)
    found = {info.key.removeprefix(attempt.folder): info for info in _objects(commits, attempt)}
    gone = sorted(crc32s.keys() - found.keys())
    if gone:
        message = f"step {attempt.step}: {', '.join(gone)} is gone; did another process sweep?"
        raise CheckpointError(f"{commits.url}: {message}")
    # A listing may not say a size.
    sizes = {
        name: commits.store.head(commits.key(info.key)).size if info.size is None else info.size
        for name, info in found.items()
    }
    return tuple(
        StoredObject(info.key, sizes[name] or 0, info.version, crc32s.get(name)) for name, info in found.items()
    )


def _objects(commits: Commits, attempt: Attempt) -> list[ObjectInfo]:
    """What is in the attempt's folder, without markers of folders and other keys that a commit cannot name."""
    return [info for info in commits.objects(attempt.folder) if Attempt.of_key(info.key) == attempt]


def _discard(commits: Commits, attempt: Attempt) -> None:
    try:
        commits.delete_objects(info.key for info in commits.objects(attempt.folder))
    except TorchobjError as error:
        logger.warning("what was written of step %d stays until sweep() finds it: %s", attempt.step, error)


def _tidy(commits: Commits, rules: Retention, beginning: Beginning) -> None:
    """Deletes what was replaced and what no rule keeps. The step is saved: what fails here is only said."""
    saved = beginning.attempt.step
    try:
        if beginning.replaced is not None:
            commits.delete_objects(item.key for item in beginning.replaced.objects)
        committed = commits.readable()
        _warn(commits, rules, committed, saved)
        going = set(doomed(committed, rules, {saved, *leftovers.steps_under_way()}))
        for commit in committed:
            if commit.step in going:
                _clear(commits, commit)
        commits.point()
    except TorchobjError as error:
        logger.warning("%s: step %d is saved, but older ones were not cleared: %s", commits.url, saved, error)
        if isinstance(error, AccessDeniedError) and error.operation == "delete":
            commits.warn_once(
                f"{commits.url}: to clear old steps, grant s3:DeleteObject; or keep all by keep_last=None"
            )


def _clear(commits: Commits, commit: Commit) -> None:
    """Deletes a step that no rule keeps. One that another process has saved anew or deleted is left to it."""
    try:
        commits.delete(commit, commits.known_version(commit.step))
    except CommittedByAnotherError as error:
        logger.warning("%s", error)
    else:
        logger.info("%s: deleted step %d: no rule keeps it", commits.url, commit.step)


def _warn(commits: Commits, rules: Retention, committed: list[Commit], saved: int) -> None:
    above = [commit.step for commit in committed if commit.step > saved]
    if above:
        message = "%s: step %d is saved, but %d stays the latest: if it was given up, delete(step) each of %s"
        logger.warning(message, commits.url, saved, above[-1], above)
    best = rules.keep_best
    if best is not None and any(commit.step == saved and best.metric not in commit.metrics for commit in committed):
        commits.warn_once(f"{commits.url}: a step is saved without the metric {best.metric!r} that keep_best goes by")
