"""Datasets over objects: `map`, `iterable`, and `objects` for samples that consist of several objects.

`base` holds what datasets of a `listing` share, whose objects `manifest_broadcast` sends from rank 0 to all ranks and
`sharding` divides; `map_style` what map-style datasets share, and `passes` iterable ones. `one_provider` has classes
for URLs of S3 or GCS only. `image_folder`, whose samples are in `labels`, and `groups` are built on `objects` and the
order of an `arranged_listing`, `table` on a `shared_table`.
`stream` is the base of iterable datasets over shards, `tar_stream` and `parquet`, with `shard_ranges`, a
`shuffle_buffer` and `tar_samples`; `tar_map` reads shards in any order by their index. `interleave` mixes datasets:
`mixture`, `member_passes`, `ordered_samples`. `wrappers` looks through mixtures and torch's wrappers.
A `dataset_reader` reads objects, by index or by reference, through the `prefetcher` of a process, and `read_ahead` in
an order that is known. `reader_constructor` has the kinds of reader, `ragged` batches of bytes, and `failures` what is
done about samples that fail. `worker_process`, `shared_values`, `reductions` and `decoders` concern DataLoader workers.
"""
