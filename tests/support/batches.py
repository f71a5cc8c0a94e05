"""Where the tensors of a batch are."""

import torch

from torchobj._torchobj import Buffer

__all__ = ["in_block"]


def in_block(tensor: torch.Tensor) -> bool:
    """Whether a tensor was received in a block, or in the copy of one that its worker had not dropped yet."""
    return isinstance(getattr(tensor.untyped_storage(), "_torchobj_memory", None), Buffer)
