"""Notes that a rank reads all samples of a loader, because neither its sampler nor its dataset divides them."""

from typing import Any

import torch.utils.data

from torchobj.datasets import undivided
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.datasets.wrappers import datasets_within, object_finder, objects_are_known
from torchobj.workers import process

_ADVICE = (
    "sampler=torchobj.ElasticDistributedSampler(dataset), or torch's DistributedSampler, to divide them, or "
    "sampler=torchobj.ElasticDistributedSampler(dataset, num_replicas=1, rank=0) if that is intended"
)

#: Number of samples that are compared.
_COMPARED = 32


def note_pass(loader: Any) -> None:
    """Records the pass that a loader begins, in the process of the loop."""
    dataset = loader.dataset
    if process.rank(None).world_size == 1:
        return
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if isinstance(dataset, ObjectIterableDataset):
            dataset.note_whole_pass()
    elif _yields_all(loader) and (samples := _samples(dataset)) is not None:
        undivided.note_pass(dataset, _ADVICE, samples=samples)


def _yields_all(loader: Any) -> bool:
    """Whether the sampler is one that yields each index once. One of another class may divide them by itself."""
    if loader.batch_sampler is not None and loader.batch_size is None:
        # Passed by the caller, or by a library that divides the batches.
        return False
    sampler = loader.sampler
    if type(sampler) is torch.utils.data.RandomSampler:
        return not sampler.replacement and sampler.num_samples >= len(loader.dataset)
    return type(sampler) is torch.utils.data.SequentialSampler


def _samples(dataset: Any) -> str | None:
    """Identifies the samples: their number, and some of them. None if their objects are not known."""
    length = len(dataset) if objects_are_known(dataset) else 0
    if length == 0:
        return None
    # Not only the first and the last one: folds of a cross-validation have these in common.
    numbers = dict.fromkeys(number * (length - 1) // (_COMPARED - 1) for number in range(_COMPARED))
    compared = [reference for _, reference in object_finder(dataset)(list(numbers))]
    listings = [getattr(inner, "_listing", None) for inner in datasets_within(dataset)]
    return f"{length} {compared} {[listing.named for listing in listings if listing is not None]}"
