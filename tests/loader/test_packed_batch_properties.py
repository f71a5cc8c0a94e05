"""Properties of batches of workers, for any nested samples: equal to torch's, and in memory of their own."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import numpy
import torch
from hypothesis import strategies as st

import torchobj
from tests.loader.test_packed_batch import Point, assert_same, ours, torchs

# A sample is made from its number.
Make = Callable[[int], Any]

DTYPES = (torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.float32, torch.complex64)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], cut: int) -> Make:
    # With a cut the tensor is not contiguous.
    return lambda i: (
        torch.arange(i, i + torch.Size((*shape, 1 + cut)).numel()).reshape(*shape, 1 + cut).to(dtype)[..., 0]
    )


def _array(dtype: str, shape: tuple[int, ...]) -> Make:
    return lambda i: numpy.full(shape, i, dtype=dtype)


LEAVES = st.one_of(
    st.builds(_tensor, st.sampled_from(DTYPES), SHAPES, st.integers(0, 2)),
    st.builds(_array, st.sampled_from(["u1", "i8", "f4", "f8", "?"]), SHAPES),
    st.sampled_from([lambda i: i, lambda i: i / 3, str, lambda i: bytes([i]), lambda i: bool(i % 2), numpy.int16]),
)


def _nested(inner: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda makes: lambda i: [make(i) for make in makes]),
        several.map(lambda makes: lambda i: tuple(make(i) for make in makes)),
        st.tuples(inner, inner).map(lambda pair: lambda i: Point(pair[0](i), pair[1](i))),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3).map(
            lambda makes: lambda i: {key: make(i) for key, make in makes.items()}
        ),
    )


SAMPLES = st.recursive(LEAVES, _nested, max_leaves=6)


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.lists(SAMPLES, min_size=1, max_size=30), st.integers(1, 4))
def test_batches_of_any_samples_are_those_of_torch(makes: list[Make], size: int) -> None:
    def sample(index: int) -> Any:
        return makes[index // size](index % size)

    batches = [list(range(size * number, size * (number + 1))) for number in range(len(makes))]
    expected = torchs(sample, batch_size=1, batch_sampler=batches)
    assert_same(ours(sample, batch_size=1, batch_sampler=batches), expected)


def _filled_by_threads(samples: list[int]) -> list[torch.Tensor]:
    sys.setswitchinterval(1e-6)
    together = threading.Barrier(4)

    def allocate(_: int) -> list[torch.Tensor]:
        together.wait(60)
        return [torchobj.collate.empty(100, dtype=torch.int64) for _ in range(300)]

    with ThreadPoolExecutor(4) as pool:
        empty = [tensor for tensors in pool.map(allocate, range(4)) for tensor in tensors]
    for number, tensor in enumerate(empty):
        tensor.fill_(number + samples[0])
    return empty


def test_threads_of_a_collate_function_get_memory_of_their_own() -> None:
    for first, batch in zip((0, 3), ours(lambda i: i, collate_fn=_filled_by_threads), strict=True):
        assert [set(tensor.tolist()) for tensor in batch] == [{first + number} for number in range(1200)]
