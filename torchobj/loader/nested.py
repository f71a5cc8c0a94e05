"""What lies within samplers: batch samplers hold others, as torch, torchdata, Lightning and Accelerate nest them."""

from typing import Any

import torch.utils.data

__all__ = ["in_batches", "innermost"]


def in_batches(sampler: Any) -> Any:
    """The sampler whose indices torch's own BatchSampler puts together; any other is itself."""
    return sampler.sampler if type(sampler) is torch.utils.data.BatchSampler else sampler


def innermost(sampler: Any) -> Any:
    """The sampler that makes the indices."""
    within = sampler
    while within is not None:
        sampler = within
        within = getattr(sampler, "sampler", None)
        if within is None:
            within = getattr(sampler, "batch_sampler", None)
    return sampler
