"""What the state of a loader holds of its iterable dataset. Takes no state of a dataset's itself: that is `tracking`.

A dataset or an iterator with `state_dict` and `load_state_dict` goes on by its own state, in each worker by that
worker's. Of any other the batches that were handed out are read again and dropped.
"""

import copy
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import torch.utils.data

from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.exceptions import ConfigError
from torchobj.loader.packing import packed, unpacked
from torchobj.loader.tracking import PassState, Stamped, TrackedDataset, collating, starting
from torchobj.stateful import is_stateful

__all__ = ["IterablePass", "place_of", "replayed", "resume"]

logger = logging.getLogger("torchobj")


class IterablePass:
    """One pass of a loader over its iterable dataset: where each process is behind the batches that were handed out.

    Args:
        loader: What iterates.
        states: Where each process begins: one for each worker, or one for the process of the loop.
        last_worker: The worker of the last batch that was handed out; -1 where there is none.
    """

    def __init__(
        self, loader: "torch.utils.data.DataLoader[Any]", states: list[PassState | None], last_worker: int
    ) -> None:
        self.tracked = TrackedDataset(
            loader.dataset, states, last_worker + 1, loader.batch_size or 1, drop_last=loader.drop_last
        )
        self.last_worker = last_worker
        self._in_workers = loader.num_workers > 0
        #: As they came, pickled, until they are asked for.
        self._states: list[PassState | bytes | None] = list(states)

    @classmethod
    def begin(
        cls, loader: "torch.utils.data.DataLoader[Any]", loaded: Mapping[str, Any] | None, before: "IterablePass | None"
    ) -> "IterablePass":
        """A pass that begins.

        Args:
            loader: What iterates.
            loaded: The state of the loader that was loaded for this pass.
            before: The pass before it of the same workers.
        """
        found = None if loaded is None or _is_of_another_epoch(loader.dataset, loaded) else _saved(loaded)
        if found is not None:
            states, last_worker = found
            if len(states) != len(_unknown(loader)):
                # Between epochs: each worker begins as the one process did; several give no state to others.
                states = states * loader.num_workers if len(states) == 1 else _unknown(loader)
            return cls(loader, states, last_worker)
        return cls(loader, _unknown(loader) if before is None else before.ended(), -1)

    def loader_of(self, loader: Any) -> Any:
        """The loader as torch's iterator is to see it: with the dataset tracked, and batches with states."""
        changed: dict[str, Any] = {"dataset": self.tracked}
        if self._in_workers:
            changed["collate_fn"] = collating(self.tracked, loader.collate_fn)
            changed["worker_init_fn"] = starting(loader.worker_init_fn)
        seen = object.__new__(type(loader))
        seen.__dict__.update(loader.__dict__, **changed)
        return seen

    def hand_out(self, batch: Stamped) -> None:
        """Notes where the worker of a batch is."""
        self.last_worker, self._states[batch.worker] = batch.worker, batch.state

    def states(self) -> list[PassState | None]:
        """Where each process is behind the last batch that was handed out; None of one that had none to hand out."""
        if not self._in_workers:
            return [copy.deepcopy(self.tracked.state())]
        return [pickle.loads(state) if isinstance(state, bytes) else state for state in self._states]  # noqa: S301  of our own worker

    def ended(self) -> list[PassState | None]:
        """Where each process begins its next pass."""
        return [None if state is None else state._replace(within=False) for state in self.states()]


def _unknown(loader: Any) -> list[PassState | None]:
    """Nothing known of any process that iterates over the dataset."""
    return [None] * max(1, loader.num_workers)


def _is_of_another_epoch(dataset: Any, loaded: Mapping[str, Any]) -> bool:
    """Whether the loop has chosen another epoch since it loaded a state."""
    own = loaded["dataset"]
    return isinstance(own, Mapping) and own["epoch"] != dataset.state_dict()["epoch"]


def replayed(dataset: Any, loaded: Mapping[str, Any] | None) -> int:
    """How many batches the next pass reads again and drops."""
    if loaded is None or loaded["sampler"] is not None or _is_of_another_epoch(dataset, loaded):
        return 0
    batches: int = loaded["batches"]
    return batches


def place_of(loader: Any, latest: IterablePass | None, *, within_epoch: bool) -> dict[str, Any]:
    """The fields of a loader's state that are of its iterable dataset.

    Args:
        loader: The loader.
        latest: The pass that it began last.
        within_epoch: Whether that goes on, and a batch of it was handed out.
    """
    dataset, is_ours = loader.dataset, isinstance(loader.dataset, ObjectIterableDataset)
    states, parent = _unknown(loader), None
    if latest is not None and within_epoch:
        states = latest.states()
    elif not is_ours and loader.num_workers == 0 and is_stateful(dataset):
        # Between passes a dataset may be at its end, or where it was when the loader was made.
        state = copy.deepcopy(dataset.state_dict())
        states = [PassState(within=latest is None, dataset=state, iterator=None, ended=latest is not None)]
    elif not is_ours and latest is not None and loader.persistent_workers:
        states = latest.ended()
    if not is_ours and loader.num_workers and is_stateful(dataset):
        parent = copy.deepcopy(dataset.state_dict())
    own = None
    if parent is not None or any(state is not None for state in states):
        workers = [None if state is None else tuple(state) for state in states]
        last_worker = latest.last_worker if latest is not None and within_epoch else -1
        own = packed({"dataset": parent, "workers": workers, "last_worker": last_worker})
    # Where it is within an epoch is in `sampler`: the keys of this are the same at every moment.
    ours = dataset.state_dict() | {"done": 0, "shape": {}} if is_ours else None
    return {"batch_size": loader.batch_size, "dataset": ours, "sampler": own}


def resume(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Prepares the dataset of a loader for the pass of a state, and returns the state in the layout of today.

    Raises:
        ConfigError: Samples would be lost, or come twice; names the field.
    """
    dataset, name = loader.dataset, type(loader.dataset).__name__
    own, num_workers = state.get("dataset"), loader.num_workers
    if isinstance(dataset, ObjectIterableDataset) != isinstance(own, Mapping):
        raise ConfigError(f"dataset={own!r}: of the state; now it is a {name}")
    if isinstance(own, Mapping) and own["done"]:
        # Layout 1 had the place here.
        states = [(True, dict(own), None)]
        state |= {"sampler": packed({"dataset": None, "workers": states, "last_worker": -1})}
        state["dataset"] = own = {**own, "done": 0, "shape": {}}
    saved = _saved(state)
    if state["within_epoch"]:
        now = {"num_workers": num_workers, "batch_size": loader.batch_size}
        if num_workers == 0 and saved is not None:
            del now["batch_size"]
        for field, value in now.items():
            if state.get(field) != value:
                raise ConfigError(
                    f"{field}={state.get(field)!r}: of the state; now {value!r}, and the batches of a {name} are others"
                )
    if saved is not None:
        _check_saved(saved[0], state, dataset)
    elif state["within_epoch"]:
        _warn_of_replay(dataset, state["batches"])
    parent = None if saved is None else unpacked(state["sampler"], "sampler")["dataset"]
    if own is not None or parent is not None:
        dataset.load_state_dict(parent if own is None else own)
    return state


def _warn_of_replay(dataset: Any, batches: int) -> None:
    name = type(dataset).__name__
    reason = f"{name} has no state_dict and load_state_dict"
    if is_stateful(dataset):
        reason = f"the state of the loader contains none of {name}, since an earlier torchobj wrote it"
    logger.warning("%s: %d batches are read again and dropped", reason, batches)


def _saved(state: Mapping[str, Any]) -> tuple[list[PassState | None], int] | None:
    """What a state holds of each process, and the worker of the last batch.

    Raises:
        ConfigError: It cannot be read.
    """
    if state["sampler"] is None:
        return None
    found = unpacked(state["sampler"], "sampler")
    try:
        workers = [None if each is None else PassState(*each) for each in found["workers"]]
        last_worker = int(found["last_worker"])
        found["dataset"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"sampler={found!r}: is no state of an iterable dataset") from error
    return workers, last_worker


def _check_saved(states: list[PassState | None], state: Mapping[str, Any], dataset: Any) -> None:
    if len(states) != max(1, int(state.get("num_workers") or 0)):
        raise ConfigError(
            f"sampler: has the states of {len(states)} processes; num_workers={state.get('num_workers')!r}"
        )
    if any(state is not None and state.dataset is not None for state in states) and not is_stateful(dataset):
        raise ConfigError(
            f"sampler: of the state is what a dataset's state_dict returned; a {type(dataset).__name__} has no "
            "state_dict and load_state_dict"
        )
