"""Distributed checkpoints (`torch.distributed.checkpoint`) in a store, read and written by torch's own too.

The map: `writer` and `reader` are what torch calls · `writing` writes a rank's items into files (`file`) · `reading`
reads them (`wanted`, `wave`, `transfer`, `foreign`, `slices`) · `item` knows the bytes around one tensor · `metadata`
and `manifest` are what stands beside the files · `prefix` says how files are named, `place` where they lie.
"""
