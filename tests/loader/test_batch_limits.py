"""Where recycled memory is not available, or not enough, torch's own way is taken."""

import os
import subprocess
import sys
import textwrap

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
