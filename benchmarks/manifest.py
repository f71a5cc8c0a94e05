"""What does a manifest of ten million objects cost: to list, save, load, share with workers and draw from?

    python benchmarks/manifest.py                    # ten million objects, some minutes
    python benchmarks/manifest.py --objects 100000   # a preview

Needs pyarrow and a C compiler. The origin computes the listing, so that its keys take no memory; it runs on the same
machine and limits the rate of the listing. `numbered` keys are `train/00000001234567.jpg` with sizes, `random` ones are
24 random hexadecimal digits with sizes and ETags. The workers are those of a DataLoader with the context `spawn`; each
has read every block of the manifest when all of them measure their proportional set size (PSS), in which shared pages
count as their share. The workers of `one object` are the same without the manifest.
"""

import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.utils.data

import torchobj
from benchmarks.harness import Program
from benchmarks.harness.measure import memory_bytes
from benchmarks.lab import origin
from benchmarks.lab.objects import MIB
from benchmarks.lab.progress import progress

WORKERS = 4
BATCH = 256
_ACCESSES = 1_000_000


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of an action, and its seconds."""
    start = time.perf_counter()
    return action(), time.perf_counter() - start


def pss_mib(mapping: str | None = None) -> float:
    """PSS of this process, or of its mappings with a name."""
    total, counted = 0, mapping is None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            counted = mapping is None or mapping in line
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


class Probe(torch.utils.data.Dataset[Any]):
    """Measures the memory of its worker once all workers have read the manifest."""

    def __init__(self, samples: Any, barrier: Any) -> None:
        self.samples, self.barrier = samples, barrier

    def __len__(self) -> int:
        return WORKERS

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        manifest = self.samples.manifest
        _, seconds = timed(lambda: [manifest.url(position) for position in range(0, len(manifest), 16)] and None)
        self.barrier.wait(600)
        measured = pss_mib(), pss_mib("torchobj-manifest")
        self.barrier.wait(600)
        return *measured, seconds


def measure_workers(manifest: torchobj.Manifest) -> dict[str, float]:
    """Seconds until all workers run, and their memory."""
    context = multiprocessing.get_context("spawn")
    samples = torchobj.S3MapDataset.from_manifest(manifest)
    loader = torch.utils.data.DataLoader(
        Probe(samples, context.Barrier(WORKERS)), batch_size=None, num_workers=WORKERS, multiprocessing_context=context
    )
    results, seconds = timed(lambda: list(loader))
    return {
        "seconds": seconds,
        "pss_mib": sum(result[0] for result in results) / WORKERS,
        "manifest_pss_mib": sum(result[1] for result in results) / WORKERS,
    }


def measure(kind: str, objects: int, folder: Path) -> dict[str, Any]:
    """All figures of one kind of keys."""
    before_bytes = memory_bytes("VmHWM") or 0
    with origin.running(0, [f"{kind}:{objects}"]) as found:
        location = found.listed(kind)
        location.enter()
        manifest, list_s = timed(lambda: torchobj.Manifest.from_prefix(location.url(""), config=location.config()))
    assert len(manifest) == objects
    list_peak_mib = ((memory_bytes("VmHWM") or 0) - before_bytes) / MIB
    digest, digest_s = timed(manifest.digest)
    path = folder / f"{kind}.parquet"
    _, save_s = timed(lambda: manifest.save(path))
    _, load_s = timed(lambda: torchobj.Manifest.load(path))
    assert torchobj.Manifest.load(path).digest() == digest
    indices = [random.randrange(objects) for _ in range(_ACCESSES)]
    _, access_s = timed(lambda: [manifest.url(index) for index in indices] and None)
    samples = torchobj.S3MapDataset.from_manifest(manifest)
    sampler = torchobj.ElasticDistributedSampler(samples, shuffle=True)
    batches, epoch_s = timed(lambda: sum(1 for _ in torch.utils.data.BatchSampler(sampler, BATCH, drop_last=False)))
    assert batches == -(-objects // BATCH)
    return {
        "objects": objects,
        "bytes_per_key": manifest.memory_bytes() / objects,
        "file_bytes_per_key": path.stat().st_size / objects,
        "list_s": list_s,
        "list_peak_mib": list_peak_mib,
        "digest_s": digest_s,
        "save_s": save_s,
        "load_s": load_s,
        "access_ns": access_s / _ACCESSES * 1e9,
        "epoch_s": epoch_s,
        "workers": measure_workers(manifest),
    }


def shown(kind: str, found: dict[str, Any], without: dict[str, float]) -> str:
    """The figures as text."""
    workers, mib = found["workers"], found["bytes_per_key"] * found["objects"] / MIB
    return "\n".join(
        (
            f"{kind}: {found['objects']:,} objects, 24 bytes per key",
            f"  memory            {found['bytes_per_key']:.1f} bytes per key, {mib:.0f} MiB",
            f"  file              {found['file_bytes_per_key']:.1f} bytes per key",
            f"  list              {found['list_s']:.1f} s, peak resident memory +{found['list_peak_mib']:.0f} MiB",
            f"  digest            {found['digest_s']:.1f} s, once",
            f"  save, load        {found['save_s']:.1f} s, {found['load_s']:.1f} s",
            f"  url(index)        {found['access_ns']:.0f} ns from Python, at random",
            f"  a shuffled epoch  {found['epoch_s']:.1f} s for batches of {BATCH} indices",
            f"  spawned workers   {WORKERS} in {workers['seconds']:.1f} s ({without['seconds']:.1f} s with one object)",
            f"  PSS per worker    {workers['pss_mib']:.0f} MiB ({without['pss_mib']:.0f} MiB with one object)",
            f"  of the manifest   {workers['manifest_pss_mib']:.0f} MiB of it",
        )
    )


def main() -> None:
    """Runs the benchmark."""
    program = Program("manifest", __doc__, without="", only="")
    program.parser.add_argument("--objects", type=int, default=10_000_000, help="keys (default ten million)")
    kind_help = "of the keys; may be repeated"
    program.parser.add_argument("--kind", choices=["numbered", "random"], action="append", help=kind_help)
    given = program.start()
    with progress("workers with one object"):
        without = measure_workers(torchobj.Manifest.from_urls(["s3://bucket/key"]))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kind or ["numbered", "random"]:
            with progress(f"{kind} keys"):
                results[kind] = measure(kind, given.objects, Path(folder))
            print(shown(kind, results[kind], without), flush=True)
    program.finish({"results": results, "one_object": without})


if __name__ == "__main__":
    main()
