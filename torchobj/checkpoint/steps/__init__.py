"""The checkpoints of a run, by step: `manager`.

A step is committed by one small object (`commit`), which `commits` writes, reads and deletes; `retention` selects the
steps to keep. `pending_save` is one save, and `restore` one restore.
"""
