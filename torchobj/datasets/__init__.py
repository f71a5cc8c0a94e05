"""Datasets over objects: `map`, `iterable`, and `objects` for samples that consist of several objects.

`base` holds what datasets of a `listing` share; `map_style` what map-style datasets share, and `passes` iterable ones.
`folders` has datasets whose samples are named by folders, `containers` those of tar shards and Parquet files, `table`
one of an Arrow table or a CSV file (`csv_table`), and `mixing` mixtures. `wrappers` looks through mixtures and torch's
wrappers. `failures` handles samples that fail, and `rank_passes` and `undivided` warn of ranks that read different
passes or the same samples.
"""
