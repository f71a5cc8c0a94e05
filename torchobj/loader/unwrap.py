"""Unwraps nested samplers, as torch, torchdata, Lightning and Accelerate build them, and makes views of loaders."""

from typing import Any

import torch.utils.data

__all__ = ["changed_view", "in_batches", "innermost"]


def in_batches(sampler: Any) -> Any:
    """The sampler within torch's own BatchSampler; any other sampler itself."""
    return sampler.sampler if type(sampler) is torch.utils.data.BatchSampler else sampler


def innermost(sampler: Any) -> Any:
    """The sampler that generates the indices."""
    within = sampler
    while within is not None:
        sampler = within
        within = getattr(sampler, "sampler", None)
        if within is None:
            within = getattr(sampler, "batch_sampler", None)
    return sampler


def changed_view(loader: Any, **changed: Any) -> Any:
    """A shallow copy of a loader with other attributes, which torch's iterator reads once."""
    view = object.__new__(type(loader))
    view.__dict__.update(loader.__dict__, **changed)
    return view
