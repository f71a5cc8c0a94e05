"""Makes the distributed checkpoints of `tests/golden/dcp`, by the torch that runs it, of which there are several.

`python tests/golden/make_golden_dcp.py tests/golden/dcp` in an environment of each torch; they are small, and committed.
The same state is made everywhere, without random numbers.
"""

import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

#: Dtypes of every torch since 2.6.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "float8_e4m3fn", "float8_e5m2"),
)


def state():
    """What the checkpoints hold."""
    numbers = torch.arange(60) % 2
    tensors = {name: numbers.to(getattr(torch, name)).reshape(3, 20) for name in DTYPES}
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "large": torch.arange(12_000.0).reshape(60, 200),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "strided": torch.arange(20.0)[::2],
        "nested": {"step": 7, "words": ["a", "b"], "weight": torch.ones(4)},
    }


def main(folder):
    """Writes the checkpoint of this torch below `folder`."""
    warnings.simplefilter("ignore")
    name = "torch-" + ".".join(torch.__version__.split(".")[:2])
    target = Path(folder) / name
    shutil.rmtree(target, ignore_errors=True)
    # A path that is no one's own: torch keeps it in the metadata.
    writer = dcp.FileSystemWriter(target, thread_count=2, sync_files=False)
    writer.storage_meta = lambda: dcp.metadata.StorageMeta(checkpoint_id=Path(name), save_id=name)
    dcp.save(state(), storage_writer=writer)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1])
