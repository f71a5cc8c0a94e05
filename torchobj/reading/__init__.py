"""Reads the objects of a dataset.

`reader` reads them by index or by reference, through the prefetcher of a process, and `read_ahead` in an order that is
known, both within the memory budget. `reader_constructor` has the kinds of reader, and `ragged` batches of bytes.
`lookahead_warning` warns of reads that were not announced.
"""
