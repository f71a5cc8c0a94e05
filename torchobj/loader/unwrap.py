"""Unwraps nested samplers, as torch, torchdata, Lightning and Accelerate build them."""

from typing import Any

import torch.utils.data

__all__ = ["in_batches", "innermost"]


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
