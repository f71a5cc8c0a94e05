"""The place of a loop over an iterable dataset, which has no order to resume: what it adds to the state of a loader."""

import logging
from collections.abc import Mapping
from typing import Any

from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.exceptions import ConfigError

__all__ = ["goes_to_its_place", "place_of", "resume"]

logger = logging.getLogger("torchobj")


def goes_to_its_place(dataset: Any, num_workers: int) -> bool:
    """Whether the dataset itself begins where it was: of ours, in the process of the loop."""
    return isinstance(dataset, ObjectIterableDataset) and num_workers == 0


def place_of(dataset: Any, batch_size: int | None, num_workers: int, *, within_epoch: bool) -> dict[str, Any]:
    """What the state of a loader says of its iterable dataset."""
    state = dataset.state_dict() if isinstance(dataset, ObjectIterableDataset) else None
    if state is not None and not (within_epoch and goes_to_its_place(dataset, num_workers)):
        state |= {"done": 0, "shape": {}}
    return {"batch_size": batch_size, "dataset": state}


def resume(dataset: Any, batch_size: int | None, num_workers: int, state: Mapping[str, Any]) -> None:
    """Prepares the dataset for the pass of a loader's `state`.

    Raises:
        ConfigError: Samples would be lost, or come twice; names the field.
    """
    name = type(dataset).__name__
    own = state.get("dataset")
    if isinstance(dataset, ObjectIterableDataset) != isinstance(own, Mapping):
        raise ConfigError(f"dataset={own!r}: of the state; now it is a {name}")
    if state["within_epoch"]:
        now = {"num_workers": num_workers, "batch_size": batch_size}
        if goes_to_its_place(dataset, num_workers):
            del now["batch_size"]
        for field, value in now.items():
            if state.get(field) != value:
                raise ConfigError(
                    f"{field}={state.get(field)!r}: of the state; now {value!r}, and the batches of a {name} are others"
                )
        if not goes_to_its_place(dataset, num_workers):
            logger.warning(
                "%s: %d batches are read again and dropped, since its workers cannot begin where they were",
                name,
                state["batches"],
            )
    if own is not None:
        dataset.load_state_dict(own)
