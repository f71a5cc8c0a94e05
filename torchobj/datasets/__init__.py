"""Datasets over objects: `map`, `iterable`, and `objects` for samples that consist of several objects.

`base` holds what datasets of a `listing` share, whose objects `manifest_broadcast` sends from rank 0 to all ranks and
`sharding` divides; `map_style` what map-style datasets share, and `passes` iterable ones. `one_provider` has classes
for URLs of S3 or GCS only. `image_folder` and `groups` are datasets of a `folder`, `table` of a `shared_table`.
`stream` is the base of iterable datasets over shards, `tar_stream` and `parquet`, with a `shuffle_buffer`; `tar_map`
reads shards in any order by their `shared_index`, and `tar_samples` has the samples of both. `interleave` mixes
datasets, by `member_passes` of each. `wrappers` looks through mixtures and torch's wrappers.
A `dataset_reader` reads objects, by index or by reference, through the prefetcher of a process, and `read_ahead` in an
order that is known, both within the `memory_budget`. `reader_constructor` has the kinds of reader, `ragged` batches of
bytes, and `failures` what is done about samples that fail. `worker_process`, `shared_values`, `descriptors` and
`decoders` concern DataLoader workers.
"""
