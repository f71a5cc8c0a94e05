"""Checkpoints of the Trainer of transformers in a bucket: commits its folders, and brings the newest one back.

The Trainer writes and rotates its folders on the local disk, and resumes from them.
"""

import numbers
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchobj.checkpoint.steps.folder_checkpoints import FolderCheckpoints
from torchobj.checkpoint.steps.retention import KeepBest
from torchobj.checkpoint.steps.stop_requests import StopRequests
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.ranks.meeting import RankGoneError
from torchobj.transformers.callbacks import warn_of_output_dir
from torchobj.warn_once import Once, warn_once

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"torchobj.transformers.CheckpointCallback needs transformers, as all of torchobj.transformers does ({error}): "
        "pip install 'torchobj[transformers]'"
    ) from error

__all__ = ["CheckpointCallback", "latest_checkpoint"]


class CheckpointCallback(TrainerCallback):
    """Commits each checkpoint of a `transformers.Trainer` in a bucket, as one of its `callbacks`.

    After the Trainer has written `checkpoint-N`, the files are hard-linked beside it, or copied where links are not
    possible, and are uploaded and committed as step N in the background while the training continues. So the Trainer
    may delete the folder meanwhile (`save_total_limit`). The training ends when the last step is committed. An error of
    a save ends the training at its next save, or at its end. The metrics of a step are the numbers that the Trainer
    logged at it, such as `loss` and `eval_loss`.

    A signal to any rank stops the training of all ranks after the same step, or after a running evaluation. The Trainer
    saves this step, which is committed before `train` returns, and `stopped` is True.

    All ranks have the callback. Each file is uploaded once: by the rank that wrote it, or by any rank of its machine.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`.
        keep_last, keep_every, keep_best, config: As for `torchobj.checkpoint.FolderCheckpoints`.
        signals: The signals that stop the training; none if it is empty. Handled while `train` runs on the main thread;
            on another thread, where Python cannot handle signals, they are not, and a warning says so.
        deadline_s: Time from a signal until the step must be committed, in seconds. After that the save ends with an
            error, and the step before remains the newest.

    Raises:
        ConfigError: The URL or a rule is not valid. During a training: it is one of a hyperparameter search, whose
            trials have the same steps.
        CheckpointError: During a training: a step is committed already, by another Trainer, or by a training that this
            one did not resume from; or another rank does not respond, or has no `CheckpointCallback`.

    Example:
        ```python
        url = "s3://bucket/run"
        trainer = Trainer(model, args, train_dataset=data, callbacks=[CheckpointCallback(url)])
        trainer.train(resume_from_checkpoint=latest_checkpoint(url, args.output_dir))
        ```
    """

    def __init__(
        self,
        url: str,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | tuple[Any, ...] | None = None,
        *,
        signals: Collection[int] = (signal.SIGTERM,),
        deadline_s: float = 25.0,
        config: StoreConfig | None = None,
    ) -> None:
        self._checkpoints = FolderCheckpoints(url, keep_last, keep_every, keep_best, config=config)
        self._numbers, self._deadline_s = tuple(signals), deadline_s
        #: Handles the signals during a training; None if they are not handled.
        self._signals: StopRequests | None = None
        #: The last step of this training that was saved.
        self._saved: int | None = None
        #: Whether a signal has stopped the last training.
        self.stopped = False
        self._once = Once()

    def on_init_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Warns of an output folder that is not local."""
        warn_of_output_dir("CheckpointCallback", self._once, args, state)

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Begins a training: handles the signals."""
        # A callback that is added to a Trainer later does not see the end of its initialization.
        self.on_init_end(args, state)
        if state.is_hyper_param_search:
            raise ConfigError(
                f"CheckpointCallback({self._checkpoints.url!r}): the trials of a hyperparameter search have the same "
                "steps; train them without the callback"
            )
        self._saved, self.stopped = None, False
        # Those of a training that failed.
        self._end_signals()
        if not self._numbers:
            return
        if threading.current_thread() is threading.main_thread():
            self._signals = self._checkpoints.on_signal(*self._numbers, deadline_s=self._deadline_s)
        else:
            warn_once(
                self._once,
                "CheckpointCallback: the Trainer does not run on the main thread: signals are not handled, and do not "
                "stop the training; pass signals=() to silence this warning",
                key="signals",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  transformers' signature
        """Stops the training with a save if a signal has asked for it."""
        if self._signals is not None:
            try:
                self.stopped = self._checkpoints.stop_requested()
            except RankGoneError as gone:
                gone.add_note("all ranks must have a CheckpointCallback")
                raise
            if self.stopped:
                control.should_training_stop = control.should_save = True
                control.should_evaluate = False
        if state.global_step == self._saved:
            # The epoch ends with a save, as its last step did: it would rewrite the files while they are uploaded.
            control.should_save = False

    on_epoch_end = on_step_end
    on_evaluate = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  transformers' signature
        """Stages the folder that the Trainer has written, and saves it in the background."""
        # All ranks have written their files when they have met in the save. The Trainer has no asynchronous writes.
        step = state.global_step
        folder, metrics = _folder_of(args.output_dir, step), _metrics(state)
        if self.stopped:
            # By the deadline of the signal.
            self._checkpoints.save(step, folder, metrics)
        else:
            self._checkpoints.save_async(step, folder, metrics)
        self._saved = step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Waits until the last step is committed, and restores the handlers of the signals."""
        try:
            self._checkpoints.wait()
            # A signal during the last upload: the caller should end the process.
            self.stopped = self._signals is not None and self._checkpoints.stop_requested()
        finally:
            self._end_signals()

    def _end_signals(self) -> None:
        if self._signals is not None:
            self._signals.end()
            self._signals = None


def latest_checkpoint(url: str, folder: str | Path, *, config: StoreConfig | None = None) -> str | None:
    """Downloads the latest committed checkpoint, for `resume_from_checkpoint` of `transformers.Trainer.train`.

    The files are downloaded into another folder, which is renamed when it is complete. A folder that has the files of
    the checkpoint already is not downloaded again; one that differs from it, such as one that the Trainer had begun to
    delete, is replaced. With several ranks all of them call it, and one rank of each machine downloads.

    Args:
        url: The URL of the checkpoints, as passed to `CheckpointCallback`.
        folder: `output_dir` of the Trainer, on the local disk; created if it does not exist.
        config: Settings of the store.

    Returns:
        The path of the checkpoint, `folder/checkpoint-N`; None if no step is committed.

    Raises:
        CheckpointError: The data of the step is damaged or gone.
        StoreError: The checkpoint cannot be read.

    Example:
        >>> import tempfile
        >>> latest_checkpoint("memory://example/new-run", tempfile.gettempdir()) is None
        True
    """
    with FolderCheckpoints(url, keep_last=None, config=config) as checkpoints:
        step = checkpoints.latest_of_ranks()
        if step is None:
            return None
        found = _folder_of(folder, step)
        checkpoints.restore(step, found, replace=True)
    return str(found)


def _folder_of(output_dir: str | Path, step: int) -> Path:
    """Returns the folder of a step, as the Trainer names it."""
    return Path(output_dir) / f"checkpoint-{step}"


def _metrics(state: Any) -> dict[str, float]:
    """Returns the numbers that the Trainer logged at the current step."""
    records = [record for record in state.log_history if record.get("step") == state.global_step]
    return {
        name: float(value)
        for record in records
        for name, value in record.items()
        if isinstance(value, numbers.Real) and name != "step"
    }
