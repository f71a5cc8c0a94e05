"""Refuses to create an object from the output of a `torch.save` that failed. Does not import torch."""

from torchobj.checkpoint.archive.zip_archive import records_in
from torchobj.exceptions import CheckpointError
from torchobj.store.file_objects import check_before_commit

__all__ = ["register"]

#: Records that torch's archive writer adds when it is closed. If pickling fails, torch.save writes a valid archive of
#: only these (torch 2.15, torch/serialization.py, `_save`).
_SERIALIZATION_ID = ".data/serialization_id"
_CLOSING_RECORDS = frozenset({"version", "byteorder", _SERIALIZATION_ID})


def register() -> None:
    """Makes every `ObjectWriter` check what it has written: it may be an argument of `torch.save` anywhere."""
    check_before_commit(_refuse_failed_save)


def _refuse_failed_save(url: str, end: bytes, length: int) -> None:
    """Raises a `CheckpointError` if `torch.save` failed in pickling: the data is an archive without a record of the
    caller.
    """
    try:
        names = records_in(end, length).keys()
    except CheckpointError:
        # Not an archive, or one whose directory is longer than the end.
        return
    if _SERIALIZATION_ID in names and names <= _CLOSING_RECORDS:
        raise CheckpointError(f"{url}: torch.save failed: nothing was written")
