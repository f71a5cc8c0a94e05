"""Which rank has which samples of a dataset.

`sample_ranks` decides among how many ranks the samples are divided, and `sharding` computes the part of each.
`broadcast` sends one listing, or another value, to the ranks of a job.
"""
