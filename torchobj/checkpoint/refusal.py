"""Whether a failed write can still take effect. Decides what may be deleted after a failure."""

from torchobj.exceptions import StoreError

__all__ = ["was_refused"]


def was_refused(error: StoreError) -> bool:
    """Whether the store refused a write, so that it was not carried out and will not be.

    After a lost response, a timeout or a status of 500 and above an attempt may still be carried out later, even where
    a later attempt of the same operation was refused.
    """
    return error.attempts == 1 and error.status is not None and 400 <= error.status < 500
