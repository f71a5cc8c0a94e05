"""Distributed checkpoints (`torch.distributed.checkpoint`) in a store, in torch's own format, or of safetensors.

`storage` implements torch's storage interfaces. `save_items` writes the items of a rank into files. `load_items` reads
them by one plan, and `other_formats` finds tensors in archives of other programs. `metadata` writes and checks the
object that names the files. `object_names` tells by a file's name which save wrote it, and `removal` deletes the files
of checkpoints and of saves that failed.

`tensor_files` writes files of safetensors instead, `consolidation` joins them, and `folder_metadata` finds the tensors
of a folder.
"""
