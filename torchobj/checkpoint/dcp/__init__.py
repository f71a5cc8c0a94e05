"""Distributed checkpoints (`torch.distributed.checkpoint`) in a store, in torch's own format.

`writer` and `reader` implement torch's storage interfaces, on `checkpoint_storage`. `save_items` writes the items of a
rank into files (`item_file`). `load_items` reads them by one plan, and `other_formats` finds tensors in archives of
other programs. `metadata` writes and checks the object that names the files. `object_names` tells by a file's name
which save wrote it: `removal` finds the files of a checkpoint, and `leftovers` those of saves that failed.
"""
