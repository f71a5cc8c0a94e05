"""Mixtures of datasets: `interleave`, by `member_passes` of each."""
