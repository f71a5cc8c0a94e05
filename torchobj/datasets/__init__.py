"""Datasets over objects: `map`, `iterable`, and `objects` for samples that consist of several objects.

`base` holds what map-style and iterable datasets share, `listing` their objects, which `manifest_broadcast` sends from
rank 0 to all ranks and `sharding` divides. `one_provider` has the classes for URLs of S3 or GCS only. `image_folder`,
whose samples are in `labels`, and `groups` are built on `objects` and the order of an `arranged_listing`, `table` on a
`shared_table`.
`passes` holds what iterable datasets share; `stream` is the base of those over shards, `tar_stream` and `parquet`, with
`shard_ranges`, a `shuffle_buffer` and `tar_samples`; `tar_map` reads shards in any order by their index. `interleave`
mixes datasets: `mixture`, `member_passes`, `ordered_samples`.
`ref_reader` reads objects by reference. `prefetch_source` reads objects through the prefetcher, `read_ahead` in the
order of an iterable dataset. `reader_constructor` has the kinds of reader, `ragged` batches of bytes, and `errors`
the handling of samples that fail. `worker_process`, `shared_values`, `reductions` and `decoders` concern DataLoader
workers.
"""
