"""Batches of workers equal those of torch's DataLoader, in type, shape, strides, values and errors."""

import collections
import functools
import pickle
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

import torchobj
from tests.support.batches import in_block


class Point(NamedTuple):
    x: Any
    y: Any


class Of(Dataset[Any]):
    """The samples `make(0)`, `make(1)`, ..."""

    def __init__(self, make: Callable[[int], Any], length: int = 6) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def ours(make: Callable[[int], Any], **arguments: Any) -> list[Any]:
    return list(torchobj.DataLoader(Of(make), **({"batch_size": 3} | arguments), num_workers=1, lookahead=0))


def torchs(make: Callable[[int], Any], **arguments: Any) -> list[Any]:
    return list(torch.utils.data.DataLoader(Of(make), **({"batch_size": 3} | arguments), num_workers=1))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert (one.requires_grad, one.is_conj(), one.is_neg()) == (
            other.requires_grad, other.is_conj(), other.is_neg(),
        )  # fmt: skip
        assert torch.equal(one, other) or bool((one != one).any())
    elif isinstance(one, numpy.ndarray):
        assert (one.dtype, one.strides, one.flags.writeable) == (other.dtype, other.strides, other.flags.writeable)
        numpy.testing.assert_array_equal(one, other)
    elif isinstance(one, collections.abc.Mapping):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, same in zip(one, other, strict=True):
            assert_same(each, same)
    else:
        assert one == other


SAMPLES: dict[str, Callable[[int], Any]] = {
    **{
        str(dtype): lambda i, dtype=dtype: torch.arange(6000).reshape(60, 100).add(i).to(dtype)
        for dtype in (
            torch.uint8,
            torch.bool,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
        )
    },
    "scalar tensor": lambda i: torch.tensor(i),
    "no elements": lambda i: torch.empty(0, 3),
    "not contiguous": lambda i: torch.arange(20000).reshape(100, 200).t().add(i)[::2],
    "expanded": lambda i: torch.tensor([float(i)]).expand(3000, 4),
    "conjugate": lambda i: torch.full((2000,), 1j + i).conj(),
    "negative bit": lambda i: torch.full((2000,), 1j + i).conj().imag,
    "numpy": lambda i: numpy.full((50, 70), i, dtype=numpy.float32),
    "numpy scalar": lambda i: numpy.float32(i),
    "numpy bool": lambda i: numpy.bool_(i % 2),
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "str": str,
    "bytes": lambda i: bytes([i]),
    "tuple": lambda i: (torch.full((5000,), i), i, "a"),
    "named tuple": lambda i: Point(torch.full((5000,), i), [i, {"z": float(i)}]),
    "dict": lambda i: {"image": torch.full((3, 50, 50), i, dtype=torch.uint8), "label": i, 3: numpy.ones(4) * i},
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=torch.ones(2000)),
}


#: Those that torch makes a batch of.
BATCHED = [name for name in SAMPLES if name not in ("conjugate", "negative bit")]
Batches = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def batches() -> Batches:
    """The batches of SAMPLES[name]. One worker makes those of all names."""

    @functools.cache
    def of_all(load: Callable[..., list[Any]], names: tuple[str, ...], **arguments: Any) -> list[Any]:
        return load(lambda i: SAMPLES[names[i // 6]](i % 6), sampler=range(6 * len(names)), **arguments)

    def of(load: Callable[..., list[Any]], name: str, names: Iterable[str] = SAMPLES, **arguments: Any) -> list[Any]:
        found, number = of_all(load, tuple(names), **arguments), list(names).index(name)
        count = len(found) // len(tuple(names))
        return found[count * number : count * (number + 1)]

    return of


@pytest.mark.parametrize("name", BATCHED)
def test_a_default_batch_is_that_of_torch(name: str, batches: Batches) -> None:
    found = batches(ours, name, BATCHED)
    assert len(found) == 2
    assert_same(found, batches(torchs, name, BATCHED))


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_without_a_batch_are_those_of_torch(name: str, batches: Batches) -> None:
    found = batches(ours, name, batch_size=None)
    assert len(found) == 6
    assert_same(found, batches(torchs, name, batch_size=None))


@pytest.mark.parametrize("name", SAMPLES)
def test_lists_of_samples_are_those_of_torch(name: str, batches: Batches) -> None:
    found = batches(ours, name, collate_fn=list)
    assert len(found) == 2
    assert_same(found, batches(torchs, name, collate_fn=list))


def error_of(load: Callable[..., list[Any]], make: Callable[[int], Any]) -> tuple[type[Exception], str]:
    """The type of the error of a loader and its last line."""
    with pytest.raises(Exception) as raised:
        load(make)
    # Otherwise the iterator is part of a reference cycle, and torch waits for its worker when it is collected.
    traceback.clear_frames(raised.tb)
    return raised.type, str(raised.value).strip().splitlines()[-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.ones(1000 + i),
        lambda i: [1] * (i + 1),
        lambda i: object(),
        lambda i: numpy.array(["a"]),
        lambda i: torch.ones(3).to_sparse(),
        lambda i: torch.ones(1000, requires_grad=True),
        lambda i: None,
        SAMPLES["conjugate"],
    ],
)
def test_an_error_is_that_of_torch(make: Callable[[int], Any]) -> None:
    assert error_of(ours, make) == error_of(torchs, make)


def test_large_tensors_are_in_blocks_and_small_ones_are_not() -> None:
    batch = ours(lambda i: (torch.full((5000,), i), i))[1]
    assert in_block(batch[0])
    assert ours(lambda i: i)[0].tolist() == [0, 1, 2]
    assert not in_block(ours(lambda i: i)[0])


def test_a_small_view_of_a_large_tensor_is_sent_as_torch_sends_it() -> None:
    large = torch.arange(100_000)
    batches = ours(lambda i: large[i : i + 2], batch_size=None)
    assert [batch.tolist() for batch in batches] == [[i, i + 1] for i in range(6)]
    assert not any(in_block(batch) for batch in batches), "100,000 numbers would be copied for each"


def _to_meta(worker: int) -> None:
    del worker
    torch.set_default_device("meta")


def _rows(samples: list[torch.Tensor]) -> Any:
    return list(torchobj.collate.default_collate(samples))


def _micro_batches(samples: list[torch.Tensor]) -> Any:
    return list(torch.utils.data.default_collate(samples).chunk(3))


def _cropped(samples: list[torch.Tensor]) -> Any:
    batch = torchobj.collate.empty((len(samples), 10_000), dtype=torch.uint8)
    return [batch[:, :100].fill_(7)]


@pytest.mark.parametrize("collate_fn", [_rows, _micro_batches, _cropped])
def test_views_of_a_batch_stay_in_its_block(collate_fn: Any) -> None:
    for batch in ours(lambda index: torch.full((5000,), index, dtype=torch.uint8), collate_fn=collate_fn):
        assert all(map(in_block, batch))
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch}) == 1


def _known(samples: list[torch.Tensor | None]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample is not None])


def test_a_collate_function_that_calls_that_of_torch_gets_a_block() -> None:
    batches = ours(lambda index: torch.full((5000,), index) if index % 3 else None, collate_fn=_known)
    assert [batch[:, 0].tolist() for batch in batches] == [[1, 2], [4, 5]]
    assert all(map(in_block, batches))
    assert default_collate_fn_map[torch.Tensor] is collate_tensor_fn, "only in workers"


class Strict(torch.Tensor):
    """A subclass that allows no function of torch, and sends itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"not allowed: {func}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _strict, (self.as_subclass(torch.Tensor),)


def _strict(tensor: torch.Tensor) -> Strict:
    return tensor.as_subclass(Strict)


def test_attributes_of_tensor_subclasses_are_not_read() -> None:
    for [batch] in ours(lambda index: torch.full((5000,), index), batch_size=1, collate_fn=_strict_rows):
        assert type(batch) is Strict


def _strict_rows(samples: list[torch.Tensor]) -> Any:
    return [sample.as_subclass(Strict) for sample in samples]


def test_a_dtype_that_torch_refuses_is_refused() -> None:
    for loader in (ours, torchs):
        with pytest.raises(NotImplementedError):
            loader(lambda _: torch.ones(20_000, dtype=torch.uint8).view(torch.qint8))


def _empty_of_numpy_lengths(samples: list[Any]) -> torch.Tensor:
    return torchobj.collate.empty(tuple(numpy.array([200, 1000], numpy.int16)), dtype=torch.uint8).fill_(len(samples))


def test_lengths_of_numpy_do_not_overflow() -> None:
    [batch, _] = ours(int, collate_fn=_empty_of_numpy_lengths)
    assert batch.shape == (200, 1000)
    assert batch.eq(3).all()


def test_another_default_device_changes_nothing() -> None:
    def make(i: int) -> torch.Tensor:
        return torch.full((2000,), i, device="cpu")

    def collated(samples: list[torch.Tensor]) -> Any:
        return samples, torchobj.collate.empty((0,))

    samples, empty = ours(make, collate_fn=collated, worker_init_fn=_to_meta)[1]
    assert [int(sample[0]) for sample in samples] == [3, 4, 5]
    assert {tensor.device.type for tensor in (empty, *samples)} == {"cpu"}
    with torch.device("meta"):
        sent = pickle.loads(ForkingPickler.dumps(samples[0]))
    assert torch.equal(sent, samples[0])


@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate, torchobj.collate.default_collate])
def test_samples_of_a_default_batch_are_counted(collate_fn: Any) -> None:
    batches = torchobj.DataLoader(Of(lambda i: (i, i)), batch_size=3, collate_fn=collate_fn)
    assert len(list(batches)) == 2
    assert batches.stats().samples == 6


def test_an_entry_of_default_collate_fn_map_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch) * 2

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, doubled)
    assert ours(lambda i: torch.full((2000,), i))[1][2, 0] == 10


def _same_twice(samples: list[torch.Tensor]) -> Any:
    stacked = torch.stack(samples)
    return stacked, stacked, stacked[1], stacked.view(-1)[3:]


def test_tensors_that_share_memory_share_it_in_the_trainer() -> None:
    stacked, same, row, flat = ours(lambda i: torch.full((5000,), i), collate_fn=_same_twice)[0]
    assert same is stacked
    assert in_block(stacked)
    row[0] = 77
    flat[0] = 78
    assert (stacked[1, 0], stacked[0, 3]) == (77, 78)
    assert stacked.untyped_storage().nbytes() == 3 * 5000 * 8


def _padded(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torchobj.collate.empty((len(samples), 4000), dtype=torch.int64)
    assert in_block(batch)
    return torch.stack(samples, out=batch)


def test_a_tensor_of_empty_is_not_copied() -> None:
    batches = ours(lambda i: torch.full((4000,), i), collate_fn=_padded)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert all(in_block(batch) for batch in batches)


def test_empty_accepts_what_torch_accepts_elsewhere() -> None:
    assert torchobj.collate.empty(5).shape == (5,)
    assert torchobj.collate.empty(numpy.int64(5)).shape == (5,)
    assert torchobj.collate.empty(torch.Size([2])).shape == (2,)
    assert torchobj.collate.empty((0, 3)).shape == (0, 3)
    assert torchobj.collate.empty([2, 3], dtype=torch.bool).dtype is torch.bool
    with pytest.raises(RuntimeError, match="negative"):
        torchobj.collate.empty((-1, 3))


@pytest.mark.matrix
def test_the_module_of_collation_is_found_without_an_import() -> None:
    import subprocess
    import sys

    code = "import sys, torchobj; assert 'torch' not in sys.modules; print(torchobj.collate.empty(3).shape)"
    assert "[3]" in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
