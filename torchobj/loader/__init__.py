"""Loaders that announce the order of their samples, so that objects are read before a worker asks for them."""

from torchobj.loader.attaching import attach
from torchobj.loader.batch_sampler import LookaheadBatchSampler
from torchobj.loader.loader import DataLoader

__all__ = ["DataLoader", "LookaheadBatchSampler", "attach"]
