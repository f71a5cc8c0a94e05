"""Equal values have equal digests, and others do not."""

import collections
import dataclasses
import enum
import functools
import random

import numpy
import pytest
import torch

from tests.support import warm_python
from torchobj.checkpoint.state.digest import digest_of


class Colour(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Point:
    x: int
    y: list


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def nested(value):
    found = [value]
    found.append(found)
    return found


#: Functions of a number: equal numbers give equal values, other numbers other values.
MAKES = {
    "int": int,
    "float": float,
    "text": str,
    "bytes": lambda n: bytes([n]),
    "tensor": lambda n: torch.tensor([1.0, n]),
    "bfloat16": lambda n: torch.tensor([1.0, n], dtype=torch.bfloat16),
    "bool": lambda n: torch.tensor(n > 1),
    "complex": lambda n: torch.tensor([complex(0, n)]).conj(),
    "sparse": lambda n: torch.eye(3).mul(n).to_sparse(),
    "shape": lambda n: torch.zeros(n, 2),
    "meta": lambda n: torch.zeros(n, device="meta"),
    "strided": lambda n: torch.arange(6.0).reshape(2, 3).mul(n).T,
    "array": lambda n: numpy.array([1, n]),
    "array of objects": lambda n: numpy.array([None, n], dtype=object),
    "numpy scalar": numpy.float32,
    "dict": lambda n: {"a": n, "b": 1},
    "key": lambda n: {n: 1},
    "counter": lambda n: collections.Counter([n]),
    "set": lambda n: {n, "a", "b"},
    "list": lambda n: [n, [n]],
    "nesting": lambda n: [[1], [2]] if n == 1 else [[1, 2], []],
    "deque": lambda n: collections.deque([n], 5),
    "default dict": lambda n: collections.defaultdict(list, {"a": [n]}),
    "enum": Colour,
    "dataclass": lambda n: Point(1, [n]),
    "slots": Slotted,
    "partial": lambda n: functools.partial(max, n),
    "function": lambda n: [max, min][n - 1],
    "class": lambda n: [Point, Slotted][n - 1],
    "dtype": lambda n: [torch.float32, torch.int8][n - 1],
    "random": random.Random,
    "itself": nested,
    "type": lambda n: [1, True, 1.0][n - 1],
}


@pytest.mark.parametrize("name", MAKES)
def test_digests_are_equal_if_and_only_if_values_are(name):
    make = MAKES[name]
    assert digest_of(make(1)) == digest_of(make(1))
    assert digest_of(make(1)) != digest_of(make(2))


def test_order_of_keys_gradients_and_sharing_make_no_difference():
    shared = torch.ones(2)
    assert digest_of([shared, shared]) == digest_of([shared, shared.clone()])
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of(torch.nn.Parameter(torch.ones(2))) == digest_of(torch.ones(2))
    assert digest_of(torch.arange(6.0).reshape(2, 3).T) == digest_of(torch.arange(6.0).reshape(2, 3).T.contiguous())
    assert digest_of(float("nan")) == digest_of(-float("nan"))


def test_a_set_has_the_same_digest_in_a_process_with_other_hashes():
    code = "from torchobj.checkpoint.state.digest import digest_of; print(digest_of({'a', 'b', 'c', ('d', frozenset('ef'))}).hex())"
    done = warm_python.run(["-c", code], check=True)
    assert done.stdout.strip() == digest_of({"a", "b", "c", ("d", frozenset("ef"))}).hex()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_of_a_gpu_has_the_digest_of_its_copy():
    tensor = torch.rand(5_000_000)
    assert digest_of(tensor.cuda()) == digest_of(tensor)
