"""Where recycled memory is not available, or not enough, torch's own way is taken."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import warm_python

PROGRAM = """
    import torch, torchobj

    class Numbered(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            return torch.full((100_000,), index)

    loader = torchobj.DataLoader(Numbered(), batch_size=4, num_workers=2, lookahead=0)
    for _ in range(2):
        batches = list(loader)
        assert [batch[:, 99].tolist() for batch in batches] == [[4 * n + i for i in range(4)] for n in range(16)]
    stats = loader.stats()
    print(stats.blocks_refused, stats.block_bytes, loader.report())
"""


def _run(prelude: str = "", wrapper: tuple[str, ...] = (), program: str = PROGRAM, **environment: str) -> str:
    code = textwrap.dedent(prelude) + textwrap.dedent(program)
    if wrapper:
        command = [*wrapper, sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    return warm_python.run(["-c", code], env=os.environ | environment, timeout=300, check=True).stdout


def test_a_list_of_all_batches_exceeds_the_limit_and_is_complete() -> None:
    refused, used, report = _run(TORCHOBJ_BUDGET_BYTES=str(16 << 20)).split(maxsplit=2)
    assert int(refused) > 0
    assert int(used) <= 16 << 20
    assert report.count("exceeded the limit on the memory of batches, 16 MiB") == 1


def test_a_batch_larger_than_the_limit_is_sent() -> None:
    refused, used, _ = _run(TORCHOBJ_BUDGET_BYTES=str(1 << 20)).split(maxsplit=2)
    assert (int(refused), int(used)) == (32, 0)


def test_a_smaller_batch_after_a_large_one_fits() -> None:
    program = """
        import torch, torchobj
        loader = torchobj.DataLoader([10, 1, 10, 1, 1], batch_size=None, num_workers=1, lookahead=0,
                                     collate_fn=lambda size: torch.zeros(size << 20, dtype=torch.uint8))
        batches = list(loader)
        print([not batch.is_shared() for batch in batches], loader.stats().blocks_refused)
    """
    found = _run(program=program, TORCHOBJ_BUDGET_BYTES=str(16 << 20))
    assert found.strip() == "[True, True, False, True, True] 1"


def test_the_first_batch_of_a_worker_is_copied_to_one_block() -> None:
    program = """
        import torch, torchobj
        loader = torchobj.DataLoader([torch.zeros(10_000)] * 600, batch_size=300, num_workers=2, lookahead=0,
                                     collate_fn=lambda samples: [sample.clone() for sample in samples])
        batches = list(loader)
        print(not any(sample.is_shared() for batch in batches for sample in batch),
              loader.stats().blocks_refused, loader.stats().block_bytes >> 20)
    """
    assert _run(program=program).split() == ["True", "0", "24"]


def test_few_descriptors_are_not_exhausted() -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
    assert int(_run(limit).split()[1]) > 0


#: Batches of many sizes, some of which are held, in processes with few descriptors.
FEW_DESCRIPTORS = """
    import resource, torch, torchobj
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))

    def grown(samples):
        return torch.full((1 << 12 + samples[0] % 8,), samples[0])

    if __name__ == "__main__":
        held = []
        loader = torchobj.DataLoader(list(range(100)), batch_size=1, num_workers=2, lookahead=0, collate_fn=grown,
                                     multiprocessing_context=CONTEXT)
        for number, batch in enumerate(loader):
            assert batch[0] == batch[-1] == number and len(batch) == 1 << 12 + number % 8
            held = [*held[-3:], batch]
        print(number + 1)
"""


@pytest.mark.parametrize("limit", [40, pytest.param(100, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.matrix)])
def test_batches_arrive_with_few_descriptors(limit: int, context: str, tmp_path: Path) -> None:
    names = f"LIMIT, CONTEXT = {limit}, {context!r}\n"
    if context == "fork":
        assert _run(names, program=FEW_DESCRIPTORS).split() == ["100"]
        return
    # Workers import the program.
    script = tmp_path / "few_descriptors.py"
    script.write_text(names + textwrap.dedent(FEW_DESCRIPTORS))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["100"], done.stderr


def test_a_worker_keeps_no_descriptor_for_a_block() -> None:
    program = """
        import os, torch, torchobj
        def sized(samples):
            found = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                     if os.path.islink(f"/proc/self/fd/{name}")]
            return torch.zeros(1 << 12 + samples[0] % 8), sum("torchobj-arena" in link for link in found)
        loader = torchobj.DataLoader(list(range(40)), batch_size=1, num_workers=1, collate_fn=sized, lookahead=0)
        counts = [count for _, count in list(loader)]
        print(counts[-1] - counts[0])
    """
    assert _run(program=program).split() == ["0"]


#: What the samples, the batches or the workers collate by the way: tensors of 4 MB that are deleted at once.
WASTEFUL = """
    import torch, torchobj
    from torch.utils.data import DataLoader, Dataset, default_collate

    def waste():
        for _ in range(40):
            WASTE

    class Samples(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            if WHERE == "transform":
                waste()
            return torch.full((2000,), index)

    def collate(samples):
        if WHERE == "collate":
            waste()
            if int(samples[0][0]) == 8:
                raise ValueError("half way")
        return default_collate(samples) if isinstance(samples, list) else samples

    loader = torchobj.DataLoader(Samples(), batch_size=SIZE, num_workers=1, collate_fn=collate, lookahead=0,
                                 worker_init_fn=lambda _: waste() if WHERE == "init" else None)
    iterator, largest, batches = iter(loader), 0, 0
    while True:
        try:
            batch = next(iterator)
            batches += int(batch.flatten()[0] >= 0)
        except StopIteration:
            break
        except ValueError:
            pass
        largest = max(largest, loader.stats().block_bytes)
    print(batches, largest)
"""
DEFAULT = "default_collate([torch.zeros(100_000)] * 10)"
NESTED = "list(DataLoader([torch.zeros(100_000)] * 20, batch_size=10))"
EMPTY = "torchobj.collate.empty(1_000_000).zero_()"


@pytest.mark.parametrize(
    ("where", "waste", "size"),
    [
        ("collate", DEFAULT, 4),
        ("transform", EMPTY, None),
        pytest.param("transform", DEFAULT, 4, marks=pytest.mark.matrix),
        pytest.param("transform", EMPTY, 4, marks=pytest.mark.matrix),
        pytest.param("transform", NESTED, 4, marks=pytest.mark.matrix),
        pytest.param("transform", DEFAULT, None, marks=pytest.mark.matrix),
        pytest.param("collate", EMPTY, 4, marks=pytest.mark.matrix),
        pytest.param("collate", NESTED, 4, marks=pytest.mark.matrix),
        pytest.param("init", DEFAULT, 4, marks=pytest.mark.matrix),
    ],
)
def test_what_is_collated_by_the_way_takes_no_more_memory_than_it_needs(
    where: str, waste: str, size: int | None
) -> None:
    program = f"WHERE, SIZE = {where!r}, {size}\n" + textwrap.dedent(WASTEFUL.replace("WASTE", waste))
    batches, largest = map(int, _run(program=program).split())
    assert batches == (24 if size is None else 5 if where == "collate" else 6)
    # Three batches on their way, of at most the large tensor and the batch.
    assert largest <= 40 << 20


@pytest.mark.parametrize(
    "mount",
    [
        pytest.param("mount -t tmpfs -o size=8m tmpfs", marks=pytest.mark.matrix),
        "mount -t tmpfs -o size=256k tmpfs",
    ],
)
def test_a_small_dev_shm_is_enough(mount: str) -> None:
    # One batch has 3.2 MB, and all of them 51 MB. A semaphore has a page until its queue is collected.
    private = ("unshare", "--mount", "sh", "-c", f'{mount} /dev/shm && exec "$@"', "sh")
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot mount another /dev/shm")
    assert _run(wrapper=private).split()[0] == "0"


def test_without_shared_memory_torchs_own_is_used() -> None:
    # As when seccomp refuses memfd_create.
    refuse = """
        import torchobj._torchobj as native
        def refused(budget):
            raise OSError("memfd_create: refused by the test")
        native.start_prefetcher = refused
    """
    assert _run(refuse).split()[:2] == ["0", "0"]


def test_batches_that_cannot_be_pickled_do_not_keep_their_objects() -> None:
    program = """
        import pathlib, tempfile, torchobj
        from torchobj import _torchobj

        with tempfile.TemporaryDirectory() as folder:
            for number in range(40):
                (pathlib.Path(folder) / f"k{number:02}").write_bytes(bytes(100_000))
            loader = torchobj.DataLoader(torchobj.ObjectMapDataset(f"file://{folder}/"), batch_size=4, num_workers=1,
                                         persistent_workers=True, collate_fn=lambda samples: (samples, lambda: 0))
            iterator, errors = iter(loader), 0
            while True:
                try:
                    next(iterator)
                except StopIteration:
                    break
                except Exception:
                    errors += 1
            print(errors, _torchobj.prefetch_stats()["granted_bytes"])
    """
    errors, granted = map(int, _run(program=program).split())
    assert errors == 10
    assert granted <= 4 * 2**17, "those of the last batch"
