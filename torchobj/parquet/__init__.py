"""Parquet files and Arrow tables of unknown origin, read within bounds. Only `rows` needs torch.

`pages` bounds what the pages of a file decode to, `row_groups` reads those that are asked for, and `rows` converts the
values of rows. `arrow` imports pyarrow.
"""
