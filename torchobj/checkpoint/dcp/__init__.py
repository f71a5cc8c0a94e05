"""Distributed checkpoints (`torch.distributed.checkpoint`) in a store, in torch's own format.

`writer` and `reader` implement torch's storage interfaces. `save_items` writes the items of a rank into files
(`item_file`). `load_items` reads them by one plan, and `foreign` finds tensors in archives of other writers.
`metadata` and `manifest` read and write the objects beside the files; `limits` checks what they claim. `contents` lists
the files of a checkpoint and removes them. `attempt` and `sweeping` find files that a failed save left. `prefix` names
files, and `checkpoint_dir` maps names to keys.
"""
