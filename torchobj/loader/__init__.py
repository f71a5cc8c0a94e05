"""Loaders that announce the order of their samples, so that objects are read before a worker needs them."""

from torchobj.loader._attach import attach
from torchobj.loader.batch_sampler import LookaheadBatchSampler
from torchobj.loader.loader import DataLoader
from torchobj.loader.order.sampler import ElasticDistributedSampler

__all__ = ["DataLoader", "ElasticDistributedSampler", "LookaheadBatchSampler", "attach"]
