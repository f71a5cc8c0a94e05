"""Makes the folders of `tests/golden/formats`: one of everything that a version of torchobj writes. They are small.

In a checkout of that version, with its extension built: `python make_golden_formats.py FOLDER` (this file does not need
to be part of the checkout). The folders are loaded by `tests/checkpoint/test_golden_formats.py`. Tensors are made
without random numbers.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchobj
from torchobj.checkpoint import CheckpointManager, RngState, StorageWriter

BATCHES = 3


class Samples(torch.utils.data.Dataset):
    """The numbers 0 to 39."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index


class Stream(torch.utils.data.IterableDataset):
    """The same, one after the other."""

    def __iter__(self):
        return iter(range(40))


def tensors():
    """What files of tensors hold."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "row": base[1],
        "half": torch.arange(6).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "large": torch.arange(6000.0).reshape(60, 100),
        "rest": [1, 2.5, "text", None, True],
    }


def loaders(rank=0, ranks=1):
    """A loader over a sampler of ours, one that shuffles by torch, and one of a stream."""
    sampler = torchobj.ElasticDistributedSampler(Samples(), num_replicas=ranks, rank=rank, seed=3)
    return {
        "elastic": torchobj.DataLoader(Samples(), batch_size=4, sampler=sampler),
        "shuffled": torchobj.DataLoader(Samples(), batch_size=4, shuffle=True),
        "stream": torchobj.DataLoader(Stream(), batch_size=4),
    }


#: The sets are read from memory, because a state contains the URLs of its dataset and the versions of its objects.
SETS = "memory://golden-sets"


def write_sets(folder):
    """Objects and a list of them, tar shards with their indexes, and a Parquet file, below a new folder."""
    sets = f"file://{folder}"
    for number in range(12):
        torchobj.Store(sets).put(f"objects/{number:02}.txt", str(number).encode())
    torchobj.Manifest.from_prefix(f"{sets}/objects/").save(f"{sets}/manifest.parquet")
    with torchobj.ShardWriter(f"{sets}/shards/%02d.tar", maxcount=20) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:04}", "cls": number, "json": {"half": number / 2}})
    torchobj.shards.TarIndex.build(f"{sets}/shards/").save(f"{sets}/index.parquet")
    table = pyarrow.table({"number": list(range(40)), "name": [str(number) for number in range(40)]})
    pyarrow.parquet.write_table(table, f"{folder}/rows.parquet", row_group_size=8)


def serve_sets(folder):
    """Copies the sets of a folder to memory, in an order that gives them the same versions in each process."""
    store = torchobj.Store(SETS)
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        store.put(str(path.relative_to(folder)), path.read_bytes())


def streams():
    """A loader over each dataset that has a state of its own."""
    mixed = torchobj.interleave([tar_samples(), rows()], [0.25, 0.75], seed=4)
    found = {"tar": tar_samples(), "rows": rows(), "mixed": mixed}
    return {name: torchobj.DataLoader(each, batch_size=2, collate_fn=plain) for name, each in found.items()}


def tar_samples():
    return torchobj.TarIterableDataset(f"{SETS}/shards/", shuffle_buffer=5, seed=1)


def rows():
    return torchobj.ParquetIterableDataset(f"{SETS}/rows.parquet", shuffle=True, seed=2)


def plain(samples):
    """Samples, or the rows of batches, as JSON has them."""
    return [as_json(sample) for sample in samples]


def as_json(value):
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "read"):
        value = value.read()
    return value if isinstance(value, int | float | str | list | None) else bytes(value).decode()


def parts(rank=0, ranks=1):
    """A training state."""
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)  # noqa: NPY002  the global generator is what RngState saves
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).reshape(2, 4))
        model.bias.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": RngState(), "epoch": 2, **loaders(rank, ranks)}


def go_on(loader):
    """What a loader yields from here."""
    return [as_json(batch) for batch in loader]


def begun(state):
    """The iterators of the loaders of a state, each after some batches."""
    iterators = {name: iter(value) for name, value in state.items() if isinstance(value, torchobj.DataLoader)}
    for iterator in iterators.values():
        for _ in range(BATCHES):
            next(iterator)
    return iterators


def write_manager(folder, *, sharded, rank=0, ranks=1):
    """Two steps, and what the loaders and generators give after the second."""
    manager = CheckpointManager(f"file://{folder}", sharded=sharded)
    state = parts(rank, ranks)
    iterators = begun(state)
    manager.save(1, {"epoch": 1})
    manager.save(20, state, metrics={"loss": 0.25, "best": float("inf")})
    rest = {name: [batch.tolist() for batch in iterator] for name, iterator in iterators.items()}
    drawn = [torch.rand(1).item(), random.random(), float(numpy.random.rand())]  # noqa: NPY002  as above
    return {"rest": rest, "drawn": drawn, "weight": state["model"].weight.tolist()}


def of_rank(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}.meet", rank=rank, world_size=ranks)
    for sharded in (False, True):
        expected = write_manager(
            Path(folder) / ("sharded" if sharded else "whole"), sharded=sharded, rank=rank, ranks=ranks
        )
        (Path(folder) / f"expected-{sharded}-{rank}.json").write_text(json.dumps(expected))
    dist.destroy_process_group()


#: A process that ends where nothing can be cleaned up.
UPLOAD = """
import os, sys, time, torchobj
config = torchobj.StoreConfig(part_bytes=5 << 20, advanced=torchobj.AdvancedOptions(whole_below_bytes=5 << 20))
writer = torchobj.open(sys.argv[1] + "/object", "wb", config=config)
writer.write(bytes(11 << 20))
time.sleep(2)
os._exit(0)
"""


def main(folder):
    """Writes everything below `folder`."""
    warnings.simplefilter("ignore")
    target = Path(folder).resolve()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    torchobj.save(tensors(), f"file://{target}/saved.pt")
    torchobj.save(tensors(), f"file://{target}/unsummed.pt", checksum=False)
    dcp.save(tensors(), storage_writer=StorageWriter(f"file://{target}/dcp", thread_count=2))
    for name in ("whole", "sharded"):
        expected = write_manager(target / name, sharded=name == "sharded")
        (target / f"{name}.json").write_text(json.dumps(expected))
    write_sets(target / "sets")
    serve_sets(target / "sets")
    for kind, states in (("loaders", loaders()), ("streams", streams())):
        iterators = begun(states)
        torch.save({name: loader.state_dict() for name, loader in states.items()}, target / f"{kind}.pt")
        rest = {name: [as_json(batch) for batch in iterator] for name, iterator in iterators.items()}
        (target / f"{kind}.json").write_text(json.dumps(rest))
        if kind == "loaders":
            torch.save(states["elastic"].sampler.state_dict(), target / "sampler.pt")
    (target / "ranks").mkdir()
    children = [
        subprocess.Popen([sys.executable, __file__, str(target / "ranks"), str(rank), "2"]) for rank in range(2)
    ]
    if any(child.wait() for child in children):
        raise SystemExit("a rank failed")
    (target / "ranks.meet").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", UPLOAD, f"file://{target}/unfinished"], check=True)
    # The parts are large; that there are some is what counts.
    [upload] = [path for path in (target / "unfinished").iterdir() if path.suffix != ".key"]
    os.truncate(upload, 4096)
    print(os.listdir(target))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        warnings.simplefilter("ignore")
        of_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[1])
    else:
        main(sys.argv[1])
