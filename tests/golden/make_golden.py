"""Checkpoints as any torch writes them. Needs torch only, so that it runs in the environment of an old one.

python -m venv /tmp/old && /tmp/old/bin/pip install torch==2.6.0 numpy
/tmp/old/bin/python tests/golden/make_golden.py write tests/golden     # torch-2.6.0.pt and torch-2.6.0-legacy.pt
/tmp/old/bin/python tests/golden/make_golden.py check file.pt          # whether it holds the same
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def of_dtype(dtype, count=6):
    """A tensor of this dtype with bytes that are known; those of bool are 0 or 1."""
    data = torch.arange(count * dtype.itemsize, dtype=torch.uint8)
    return (data % 2).view(dtype) if dtype is torch.bool else data.view(dtype)


def golden():
    """The object that the files hold: the same under every torch."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    weight = torch.nn.Parameter(torch.full((3, 2), 0.5))
    return {
        "dtypes": {str(dtype): of_dtype(dtype) for dtype in DTYPES},
        "base": base,
        "row": base[1],
        "transposed": base.t(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "tied": OrderedDict([("encoder", weight), ("decoder", weight)]),
        "sparse": torch.eye(3).to_sparse(),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.25, "params": [0]}]},
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "rest": [1, 2.5, "text", None, True, (b"bytes", {3})],
    }


def legacy():
    """The same, without the dtypes that torch writes in the old format but cannot read."""
    value = golden()
    for name in [name for name in value["dtypes"] if "float8" in name or name[-6:] in ("uint16", "uint32", "uint64")]:
        del value["dtypes"][name]
    return value


def differences(left, right, path="object"):
    """Where two objects differ; nothing if they are the same, bytes and strides and all."""
    if type(left) is not type(right):
        return [f"{path}: {type(left)} and {type(right)}"]
    if isinstance(left, torch.Tensor):
        forms = [(tensor.dtype, tensor.shape, tensor.layout, tensor.is_conj()) for tensor in (left, right)]
        if forms[0] != forms[1]:
            return [f"{path}: {forms[0]} and {forms[1]}"]
        if left.layout is not torch.strided:
            left, right = left.to_dense(), right.to_dense()
        if left.stride() != right.stride():
            return [f"{path}: strides {left.stride()} and {right.stride()}"]
        raw = [tensor.detach().resolve_conj().contiguous().flatten() for tensor in (left, right)]
        equal = not left.numel() or torch.equal(raw[0].view(torch.uint8), raw[1].view(torch.uint8))
        return [] if equal else [f"{path}: other elements"]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} and {list(right)}"]
        return [line for key in left for line in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, (list, tuple)) and len(left) == len(right):
        both = enumerate(zip(left, right))  # noqa: B905  the lengths were compared
        return [line for index, pair in both for line in differences(*pair, f"{path}.{index}")]
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]


def write(folder):
    """Writes both formats."""
    version = torch.__version__.partition("+")[0]
    torch.save(golden(), folder / f"torch-{version}.pt")
    torch.save(legacy(), folder / f"torch-{version}-legacy.pt", _use_new_zipfile_serialization=False)


def check(file):
    """Loads a file by this torch; ends with an error that names what differs."""
    expected = legacy() if "legacy" in file.name else golden()
    found = differences(expected, torch.load(file, weights_only=True))
    if found:
        raise SystemExit("\n".join(found))
    print(f"torch {torch.__version__} loads {file}: the same")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
