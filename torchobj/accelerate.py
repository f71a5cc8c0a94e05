"""The state of an Accelerator of Accelerate in a bucket: `save_state` and `load_state`. Needs accelerate installed.

Accelerate itself writes and reads the state, in a temporary folder, which `FolderCheckpoints` commits and restores.
"""

import contextlib
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchobj.checkpoint.steps.folder_checkpoints import FolderCheckpoints
from torchobj.checkpoint.steps.temporary_folder import TemporaryFolder
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.ranks.machine import machine

try:
    from accelerate.utils import gather_object
except ImportError as error:
    raise ImportError(f"torchobj.accelerate needs accelerate ({error}): pip install accelerate") from error

__all__ = ["load_state", "save_state"]

#: The checkpoints of each Accelerator, by arguments: their ranks have a process group of their own.
_checkpoints: weakref.WeakKeyDictionary[Any, dict[Any, FolderCheckpoints]] = weakref.WeakKeyDictionary()


def save_state(
    accelerator: Any, url: str, step: int | None = None, *, keep_last: int | None = 3, config: StoreConfig | None = None
) -> int:
    """Saves what `accelerator.save_state` saves as one checkpoint; it is committed when this returns.

    The state consists of models, optimizers, schedulers, dataloaders that have a state, the scaler, the generators of
    random numbers of each rank, and registered objects. It is written to a temporary folder in `project_dir`, or in
    that of the system, and uploaded from there. With `automatic_checkpoint_naming` it is written where Accelerate keeps
    its own checkpoints. All ranks call it; each file is uploaded once.

    Args:
        accelerator: The `accelerate.Accelerator`.
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`.
        step: Number of the step, 0 or more; by default `accelerator.save_iteration`, which counts the saves, and which
            `load_state` continues.
        keep_last: Number of the newest committed steps to keep; None keeps all. `FolderCheckpoints` has more rules.
        config: Settings of the store.

    Returns:
        The step.

    Raises:
        CheckpointError: The step is committed already.
        ConfigError: The URL or the step is not valid, or a folder cannot be created.
        StoreError: The data could not be written. Nothing is committed.

    Example:
        >>> import accelerate, torch
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
        >>> save_state(accelerator, "memory://example/accelerate"), load_state(accelerator, "memory://example/accelerate")
        (0, 0)
    """
    number = accelerator.save_iteration if step is None else step
    with _state_folder(accelerator) as folder:
        written = accelerator.save_state(str(folder))
        _checkpoints_of(accelerator, url, keep_last, config).save(number, written)
    return number


def load_state(accelerator: Any, url: str, *, config: StoreConfig | None = None) -> int | None:
    """Loads the latest committed checkpoint by `accelerator.load_state`.

    The files are downloaded into a temporary folder, by one rank of each machine. All ranks call it.

    Args:
        accelerator: The `accelerate.Accelerator`, with the same objects prepared and registered as for the save.
        url: The URL of the checkpoints, as passed to `save_state`.
        config: Settings of the store.

    Returns:
        The step; None if no step is committed, and nothing was loaded. `accelerator.save_iteration` is the next one.

    Raises:
        CheckpointError: The data of the step is damaged or gone.
        ConfigError: The URL is not valid, or a folder cannot be created.
        StoreError: The checkpoint cannot be read.
    """
    checkpoints = _checkpoints_of(accelerator, url, None, config)
    with _state_folder(accelerator) as folder:
        step = checkpoints.restore("latest", folder, missing_ok=True)
        if step is None:
            return None
        accelerator.load_state(str(folder))
        # Not before all ranks of the machine have read it.
        accelerator.wait_for_everyone()
    accelerator.project_configuration.iteration = step + 1
    return step


def _checkpoints_of(accelerator: Any, url: str, keep_last: int | None, config: StoreConfig | None) -> FolderCheckpoints:
    known = _checkpoints.setdefault(accelerator, {})
    key = url, keep_last, config
    if key not in known:
        known[key] = FolderCheckpoints(url, keep_last, config=config)
    return known[key]


@contextlib.contextmanager
def _state_folder(accelerator: Any) -> Iterator[Path]:
    """The path of a new folder for a state, the same for the ranks of a machine; deleted at the end of the block."""
    own: Path | None = None
    failed: str | None = None
    with contextlib.ExitStack() as stack:
        if accelerator.is_local_main_process:
            base = Path(accelerator.project_dir or tempfile.gettempdir())
            try:
                base.mkdir(parents=True, exist_ok=True)
                own = stack.enter_context(TemporaryFolder(base)).files / "state"
            except (ConfigError, OSError) as error:
                failed = f"project_dir={accelerator.project_dir!r}: {error}"
        of_all = gather_object([(machine(), own, failed)])
        for *_, reason in of_all:
            if reason is not None:
                raise ConfigError(reason)
        yield next(path for host, path, _ in of_all if path is not None and host == machine())
