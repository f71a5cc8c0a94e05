"""Datasets over objects: `map`, `iterable`, and `objects` for samples that consist of several objects.

`samples` reads and builds the samples of map-style datasets and of `iterable`; `listing` finds their objects, `base`
has what both kinds share, and `passes` what iterable datasets share.
`folders` has datasets whose samples are named by folders, `containers` those of tar shards and Parquet files, `table`
one of an Arrow table or a CSV file (`csv_table`), and `mixing` mixtures. `wrappers` looks through mixtures and torch's
wrappers. `failures` handles samples that fail, and `rank_passes` and `undivided` warn of ranks that read different
passes or the same samples.
"""
