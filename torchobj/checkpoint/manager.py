"""Checkpoints by step: saved whole or not at all, found, restored, and deleted by rule.

Who does what: `saving` makes one save; `commits` makes a step real and names its objects; `snapshot` copies or watches
the state, `divided` copies one that all ranks have parts of; `ranks` gives all ranks one outcome; `retention` says what
is deleted; `leftovers` finds what killed saves left. The manager calls them, and runs one save at a time.
"""

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch

from torchobj.checkpoint import leftovers, saving, sharded
from torchobj.checkpoint.commit_format import checked_step
from torchobj.checkpoint.commits import Commit, Commits
from torchobj.checkpoint.handle import SaveHandle
from torchobj.checkpoint.leftovers import Leftover
from torchobj.checkpoint.load import load
from torchobj.checkpoint.rank_states import gathered, own
from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.restoring import restore_file
from torchobj.checkpoint.retention import KeepBest, Retention
from torchobj.checkpoint.snapshot import Snapshots, state_of
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError

__all__ = ["CheckpointManager"]

_Answer = TypeVar("_Answer")


class CheckpointManager:
    """Saves and restores checkpoints by step.

    A step exists when its commit object exists, which is written last. So a save that fails, is killed, or comes second
    to another writer of the same step is no checkpoint; nor is it counted by the rules that keep others. With
    `torch.distributed`, all ranks call `save`, `save_async`, `restore`, `wait` and `close` in the same order, and have
    the same outcome. What only looks (`steps`, `latest`, `best`, `metrics`) asks the store on the rank that calls it,
    which may be one alone; all ranks see the same while no save is under way.

    The latest step is the one with the largest number. After going back to an older step, `delete` those that were
    given up: until the new ones pass them, one of them stays the latest. The log warns at each such save.

    Args:
        url: `s3://bucket/folder`, `file:///folder` or `memory://name/folder`. In it `commits/`, `steps/` and
            `latest.json` are the manager's.
        keep_last: The newest so many committed steps are kept, by their numbers and by the time of their commits:
            whoever goes back and saves smaller steps has both kinds. None keeps all, and goes with no other rule.
        keep_every: Steps that are multiples of it are kept.
        keep_best: Steps with the best values of a metric are kept: `KeepBest("loss", "min", 2)`, or that as a tuple. Of
            a step that is saved without the metric the log warns once.
        sharded: Every rank writes its own part, by `torch.distributed.checkpoint`. False: the first rank writes the
            state, as one file of `torch.save`.
        process_group: The ranks that save; all when None.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Raises:
        ConfigError: No URL of a folder, a rule that is none, or a `process_group` that this rank is not of.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> with CheckpointManager("memory://example/run-1", keep_last=2) as checkpoints:
        ...     for step in (100, 200, 300):
        ...         checkpoints.save(step, {"model": model, "step": step}, metrics={"loss": 1 / step})
        ...     checkpoints.steps(), checkpoints.restore(into={"model": model, "step": 0})["step"]
        ([200, 300], 300)
    """

    def __init__(
        self,
        url: str,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | tuple[Any, ...] | None = None,
        *,
        sharded: bool = False,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        best = KeepBest(*keep_best) if isinstance(keep_best, tuple) and 2 <= len(keep_best) <= 3 else keep_best
        self._rules = Retention(keep_last, keep_every, best)  # type: ignore[arg-type]  # checked there
        self._config = store_config(config, region, endpoint_url)
        self._commits = Commits(url, self._config)
        self._sharded = sharded
        # Two: a save in the background talks to the other ranks while the next one is begun.
        self._ranks, self._background = Ranks(process_group), Ranks(process_group)
        self._snapshots = Snapshots()
        self._handle: SaveHandle | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """Where the checkpoints are, without a slash at the end."""
        return self._commits.url

    def __repr__(self) -> str:
        return f"CheckpointManager({self.url!r})"

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Saves a step; when this returns it is committed. Waits for a save in the background first.

        Args:
            step: Its number, 0 or more; the same on all ranks.
            state: A dict. Values with `state_dict` and `load_state_dict` (a model, an optimizer, a `DataLoader` or
                `ElasticDistributedSampler` of torchobj, an `RngState`) are asked for theirs, in dicts within it too,
                not in lists. What a restore will refuse unless `weights_only=False` is named in the log. Tensors are
                not to be changed before this returns.
            metrics: Numbers by name, for `keep_best`, kept in the commit object.
            overwrite: Replaces the step where it is committed; the old one stays until the new one is. Also one whose
                commit object cannot be read: its data is a leftover then.

        Raises:
            CheckpointError: The step is committed already, or another writer committed it first.
            ConfigError: No such step, state or metrics.
            StoreError: What kept it from being written. Nothing is committed then, unless a note of the error says that
                this is not known.
            Exception: What an earlier save in the background failed with, if nobody was told; this one was not begun.
        """
        self._make_way("wait")
        self._prepared(step, state, metrics, overwrite=overwrite, stage=None, ranks=self._ranks)()

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        stage: bool = True,
        when_busy: Literal["wait", "fail"] = "wait",
        overwrite: bool = False,
    ) -> SaveHandle:
        """Saves a step in the background. One save at a time is under way.

        Args:
            step, state, metrics, overwrite: As for `save`.
            stage: Copies the state before this returns: it takes the memory of the state, or of this rank's part, once
                more, on the CPU; pinned where tensors are on a GPU; and the next save uses it again. False: tensors are
                read where they are while training goes on; if one was written to by the end, the save fails with its
                name and nothing is committed. Writes past autograd's eyes, as through `.data` or a numpy view, are not
                seen, and may be committed in half. Not for sharded states.
            when_busy: With a save still under way: `wait` for it, or `fail`.

        Returns:
            The save under way. Its error is raised by the manager's next call where nobody asks for it.

        Raises:
            CheckpointError: The step is committed already; or a save is under way and `when_busy="fail"`.
            ConfigError: No such step, state or metrics; or a tensor that cannot be watched.
            Exception: What pickling raises for what cannot be pickled; what an earlier save failed with, as in `save`.
        """
        if when_busy not in ("wait", "fail"):
            raise ConfigError(f"when_busy={when_busy!r}: must be wait or fail")
        self._make_way(when_busy)
        work = self._prepared(step, state, metrics, overwrite=overwrite, stage=stage, ranks=self._background)
        self._handle = SaveHandle(checked_step(step), work)
        self._handle.start()
        return self._handle

    def _make_way(self, when_busy: Literal["wait", "fail"]) -> None:
        """Returns when no save is under way, on all ranks or none."""
        error: BaseException | None = None
        if self._closed:
            error = CheckpointError(f"{self.url}: the manager is closed")
        elif self._handle is not None:
            if when_busy == "fail" and not self._handle.done():
                error = CheckpointError(f"{self.url}: step {self._handle.step} is still being saved")
            else:
                error = self._ended()
        self._ranks.agree(error)

    def _ended(self) -> BaseException | None:
        """Waits for a save under way, and returns an error that nobody was told of."""
        error = None if self._handle is None else self._handle.untold()
        # Not before: who is interrupted while he waits still has a save under way, which reads the snapshot.
        self._handle = None
        return error

    def _prepared(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        *,
        overwrite: bool,
        stage: bool | None,
        ranks: Ranks,
    ) -> Callable[[], None]:
        """A save of which only the work is left, when all ranks have come so far. `stage` None: the caller waits."""
        ranks.meet()
        beginning = self._of_first(lambda: saving.begun(self._commits, checked_step(step), overwrite=overwrite))
        folder = f"{self.url}/{beginning.attempt.folder}"
        numbers = self._ranks.together(lambda: saving.checked_metrics(metrics))
        self._ranks.together(lambda: saving.check_same(step, beginning))
        # On all ranks: to give a state may take all of them.
        taken = gathered(state, self._ranks.together(lambda: state_of(state)), self._ranks)
        if self._sharded:
            make = partial(saving.sharded_data, taken, folder, self._config, ranks, self._snapshots, stage=stage)
        else:
            make = partial(saving.whole_data, taken, folder, self._config, self._snapshots, stage=stage)
        is_written = self._sharded or self._ranks.is_first
        data = self._ranks.together(lambda: make() if is_written else saving.OF_ANOTHER_RANK)
        return lambda: saving.run(self._commits, self._rules, beginning, data, metrics=numbers, ranks=ranks)

    def _of_first(self, ask: Callable[[], _Answer]) -> _Answer:
        """What the first rank finds, or raises, on all ranks."""
        error, answer = None, None
        if self._ranks.is_first:
            try:
                answer = ask()
            except BaseException as caught:  # noqa: BLE001  all ranks raise it
                error = caught
        self._ranks.agree(error)
        return cast("_Answer", self._ranks.broadcast(answer))

    def steps(self) -> list[int]:
        """The committed steps, ascending. One listing, as for `latest`."""
        return sorted(self._commits.versions())

    def latest(self) -> int | None:
        """The newest committed step: the one with the largest number. None where there is none."""
        return max(self._commits.versions(), default=None)

    def best(self) -> int | None:
        """The committed step that is best by `keep_best`. None where no step has the metric.

        Raises:
            ConfigError: The manager has no such rule.
        """
        if self._rules.keep_best is None:
            raise ConfigError("keep_best=None: it says by which metric a step is best")
        return next(iter(self._rules.keep_best.ranked(self._commits.readable())), None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a committed step was saved with.

        Raises:
            CheckpointError: It is not committed.
        """
        return dict(self._committed(checked_step(step)).metrics)

    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        into: MutableMapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        weights_only: bool = True,
    ) -> MutableMapping[str, Any]:
        """Reads a committed step. All ranks call it, and read the same step.

        Args:
            step: Its number, or the newest.
            into: A dict as it was given to `save`: its tensors are filled in place, its objects load their states, its
                dicts are entered, other values are replaced. It may have fewer names than the checkpoint, but below
                each of them all that the checkpoint has. A sharded checkpoint needs it.
            map_location: Where tensors are put without `into`, as for `torch.load`.
            weights_only: Refuses what is not plain data, as `torch.load` does.

        Returns:
            `into`; without it the state, with states in the places of objects.

        Raises:
            CheckpointError: The step is not committed, its data is gone, it was saved by a manager with another
                `sharded`, or it does not fit `into`: nothing was changed then, unless an object refused its state.
            ConfigError: No such step, or arguments that do not go together.
            StoreError: It cannot be read. What `into` holds then is half of this and half of that.
        """
        found = self._of_first(lambda: self._found(step))
        source = f"{self.url}, step {found.step}"
        folder = f"{self.url}/{found.attempt.folder}"
        self._ranks.together(lambda: self._check_fits(found, into, map_location, source))
        try:
            if into is not None and self._sharded:
                return sharded.restored(into, folder, self._config, self._ranks, source, weights_only=weights_only)
            return self._ranks.together(
                lambda: self._read(folder, into, map_location, source, weights_only=weights_only)
            )
        except ObjectNotFoundError as gone:
            raise CheckpointError(f"{source}: committed, but its data is gone: {gone}") from gone

    def _check_fits(self, found: Commit, into: Any, map_location: Any, source: str) -> None:
        if (found.kind == "dcp") != self._sharded:
            raise CheckpointError(f"{source}: saved with sharded={not self._sharded}; give the manager the same")
        if into is None and self._sharded:
            raise ConfigError(f"{source}: a sharded checkpoint is restored into a state; give into=")
        if into is not None and not isinstance(into, MutableMapping):
            raise ConfigError(f"into is a {type(into).__name__}: must be a dict, as {{'model': model}}")
        if into is not None and map_location is not None:
            raise ConfigError("map_location= does not go with into=: tensors stay where they are")

    def _read(
        self, folder: str, into: MutableMapping[str, Any] | None, map_location: Any, source: str, *, weights_only: bool
    ) -> MutableMapping[str, Any]:
        """The state of a file."""
        url = folder + saving.STATE_FILE
        if into is None:
            loaded: dict[str, Any] = load(url, map_location, weights_only, config=self._config)
            return cast("dict[str, Any]", own(loaded, self._ranks, source))
        restore_file(into, url, self._config, self._ranks, weights_only=weights_only, source=source)
        return into

    def _found(self, step: int | Literal["latest"]) -> Commit:
        if not isinstance(step, str) and not hasattr(step, "__index__"):
            raise ConfigError(
                f"step is a {type(step).__name__}: must be a number or 'latest'; a state is given as into="
            )
        if isinstance(step, str) and step != "latest":
            raise ConfigError(f"step={step!r}: must be a number or 'latest'")
        number = self.latest() if step == "latest" else checked_step(step)
        if number is None:
            raise CheckpointError(f"{self.url}: no step is committed")
        return self._committed(number)

    def _committed(self, step: int) -> Commit:
        try:
            return self._commits.read(step)
        except ObjectNotFoundError:
            raise self._not_committed(step) from None

    def _not_committed(self, step: int) -> CheckpointError:
        return CheckpointError(f"{self.url}: step {step} is not committed; there are {self.steps()}")

    def delete(self, step: int) -> None:
        """Deletes a committed step, also the newest. One rank calls it.

        Of a step whose commit object cannot be read that object alone goes; its data is a leftover then.

        Raises:
            CheckpointError: It is not committed, or was saved anew meanwhile.
        """
        try:
            self._commits.delete_step(checked_step(step))
        except ObjectNotFoundError:
            raise self._not_committed(step) from None

    def leftovers(self) -> list[Leftover]:
        """What attempts left that were never committed: objects, and unfinished uploads. One rank calls it.

        A save that another process has under way looks the same: compare `modified`.
        """
        return leftovers.leftovers(self._commits)

    def sweep(self, older_than_s: float = 3600.0) -> list[Leftover]:
        """Deletes leftovers. One rank calls it.

        Args:
            older_than_s: Only of attempts that wrote nothing for so long, by the store's clock. It must be longer than
                a save of another process goes without finishing an object or beginning one.

        Returns:
            What was deleted.
        """
        if older_than_s < 0:
            raise ConfigError(f"older_than_s={older_than_s!r}: must be 0 or more seconds")
        return leftovers.sweep(self._commits, older_than_s)

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            Exception: What it failed with, if nobody was told.
        """
        if (error := self._ended()) is not None:
            raise error

    def close(self) -> None:
        """Waits as `wait` does, and gives back the memory of snapshots."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._snapshots.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            # It is in the log; the block's own error is the one to raise.
            if exc is None:
                raise
