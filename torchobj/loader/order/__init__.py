"""The order of samples: a `sampler` by a `permutation`, and the `position` in the order of any sampler."""
