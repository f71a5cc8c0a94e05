"""Datasets whose objects contain many samples: tar shards and Parquet files.

`stream` is the base of the iterable ones, `tar_stream` and `parquet`, with a `shuffle_buffer`. `tar_map` reads shards
in any order by their `shared_index`. `tar_samples` has the samples of both.
"""
