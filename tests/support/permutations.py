"""Orders of `ElasticDistributedSampler` and of the permutation that it computes."""

import numpy as np

from torchobj import ElasticDistributedSampler
from torchobj.loader.order.permutation import Permutation


def permuted(size, seed=0, epoch=0):
    return Permutation(size, seed, epoch).at(np.arange(size, dtype=np.uint64)).tolist()


def sampler(size=24, num_replicas=1, rank=0, **settings):
    return ElasticDistributedSampler(range(size), num_replicas, rank, **settings)
