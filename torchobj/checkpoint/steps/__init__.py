"""The checkpoints of a run, by step: `checkpoints`, and `manager` for the state of objects.

A step is committed by one small object (`commit`), which `commits` writes, reads and deletes; `retention` selects the
steps to keep. `pending_save` is one save of a `content`, and `restore` one restore of a state.
"""
