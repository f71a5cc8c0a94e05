"""Copies of tensors that are not contiguous memory of this machine: made piece by piece, a few MiB at a time."""

from collections.abc import Iterator

import torch

__all__ = ["PIECE_BYTES", "staged_pieces", "staged_whole"]

#: The largest copy that is made at once.
PIECE_BYTES = 16 << 20


def staged_whole(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, of the same shape. Shares no memory with `tensor`."""
    copy = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
    return copy.resolve_conj().resolve_neg()


def staged_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous copies on the CPU of at most `PIECE_BYTES` that are the tensor's memory when they are joined."""
    if tensor.nbytes <= PIECE_BYTES:
        yield staged_whole(tensor)
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from staged_pieces(row)
        return
    for rows in torch.split(tensor, PIECE_BYTES // row_bytes):
        yield staged_whole(rows)
