"""Which bytes of a saved chunk a slice of it is. Pure arithmetic: knows no tensors and no files.

A chunk lies in row-major order. A slice is where it begins in each dimension, and how long it is there.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Shape", "Tile", "runs_of", "tiles_of"]

Shape = tuple[int, ...]


def runs_of(shape: Shape, offsets: Shape, lengths: Shape) -> tuple[int, list[int]]:
    """A slice as runs of elements that lie together.

    Args:
        shape: Of the chunk.
        offsets, lengths: Of the slice; none of them is empty.

    Returns:
        The length of each run, and where each begins, in the order of the slice's own elements.

    Example:
        >>> runs_of((4, 3), (1, 0), (2, 3))
        (6, [3])
        >>> runs_of((4, 3), (1, 0), (2, 2))
        (2, [3, 6])
    """
    whole = len(shape)
    while whole and lengths[whole - 1] == shape[whole - 1]:
        whole -= 1
    if whole == 0:
        return math.prod(shape), [0]
    strides = _strides(shape)
    starts = [offsets[whole - 1] * strides[whole - 1]]
    for dimension in range(whole - 2, -1, -1):
        first, stride = offsets[dimension], strides[dimension]
        moves = [(first + index) * stride for index in range(lengths[dimension])]
        starts = [move + start for move in moves for start in starts]
    return lengths[whole - 1] * strides[whole - 1], starts


def _strides(shape: Shape) -> list[int]:
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return strides


class Tile(NamedTuple):
    """A part of a slice that is read at once: a range of whole rows, with what is wanted of them."""

    start: int
    """The first element of the range, in the chunk."""
    shape: Shape
    """Of the rows that are read."""
    inner: Shape
    """Where in them the tile begins."""
    outer: Shape
    """Where in the slice the tile lies."""
    lengths: Shape
    """Of the tile."""


def tiles_of(shape: Shape, offsets: Shape, lengths: Shape, most: int) -> Iterator[Tile]:
    """A slice in tiles, in order. Each reads at most `most` elements, if one row of the last dimension is no more.

    Args:
        shape: Of the chunk.
        offsets, lengths: Of the slice; none of them is empty.
        most: Elements.
    """
    yield from _tiles((shape, offsets, lengths), most, 0, ())


def _tiles(box: tuple[Shape, Shape, Shape], most: int, start: int, outer: Shape) -> Iterator[Tile]:
    """The tiles of a slice of one row, which is at `outer` in the dimensions before, and begins at `start`."""
    shape, offsets, lengths = box
    before = (1,) * len(outer)
    zeros = (0,) * len(outer)
    if not shape:
        yield Tile(start, before, zeros, outer, before)
        return
    row = math.prod(shape[1:])
    if row > most and len(shape) > 1:
        for index in range(lengths[0]):
            first = start + (offsets[0] + index) * row
            yield from _tiles((shape[1:], offsets[1:], lengths[1:]), most, first, (*outer, index))
        return
    step = max(1, most // row)
    for index in range(0, lengths[0], step):
        count = min(step, lengths[0] - index)
        yield Tile(
            start + (offsets[0] + index) * row,
            (*before, count, *shape[1:]),
            (*zeros, 0, *offsets[1:]),
            (*outer, index, *((0,) * (len(shape) - 1))),
            (*before, count, *lengths[1:]),
        )
