"""Run by `test_loader_memory.py`: loops over a loader while watching the process tree's memory; prints figures as JSON.

The folder holds sparse files, which have many bytes and use no disk space.
"""

import gc
import json
import os
import random
import sys
import threading
from pathlib import Path

import torch

import torchobj
from tests.support.process_memory import pss_bytes

SIZE = 256 << 10
PAUSE = threading.Event()
BATCH = {"batch_size": 16, "num_workers": 2}


class InMemory(torch.utils.data.Dataset):
    """The same samples without reading."""

    def __init__(self, count):
        self.count, self.sample = count, torch.zeros(SIZE, dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.sample.clone()


def decoded(reader):
    return torch.frombuffer(reader, dtype=torch.uint8).clone()


def tree(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


class Watch(threading.Thread):
    """Continuously sums the memory of this process and its children; `peak_bytes` is the largest sum."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak_bytes, self.samples, self.stopped = 0, 0, threading.Event()
        self.looked = threading.Event()
        self.start()

    def run(self):
        while not self.stopped.wait(0.03):
            total = 0
            for pid in self.tree():
                # A process may exit meanwhile.
                try:
                    total += pss_bytes(pid)
                except OSError:
                    continue
            self.peak_bytes, self.samples = max(self.peak_bytes, total), self.samples + 1
            self.looked.set()

    def tree(self):
        try:
            return tree(os.getpid())
        except OSError:
            return []

    def look(self):
        """Waits for a measurement."""
        self.looked.clear()
        assert self.looked.wait(60)

    def end(self):
        self.stopped.set()
        self.join()
        assert self.samples > 5
        return self.peak_bytes


def epochs(loader, breaks, watch):
    """Runs ten epochs that stop early, or one complete epoch."""
    for _ in range(10 if breaks else 1):
        for number, batch in enumerate(loader):
            assert batch.shape[1] == SIZE
            if number % 4 == 0:
                watch.look()
            if breaks and number == 8:
                break


def peak(loader_class, dataset, breaks):
    gc.collect()
    loader = loader_class(dataset, shuffle=True, persistent_workers=breaks, **BATCH)
    # Allocate what is allocated once before measuring.
    next(iter(loader))
    watch = Watch()
    epochs(loader, breaks, watch)
    return watch.end()


def settled():
    """Returns the numbers of open blocks, which are reused, of other descriptors and of threads.

    Waits until the arena has noticed that the workers exited and the numbers have stayed the same for a quarter of a second.
    """
    found, same = None, 0
    for _ in range(1000):
        files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        blocks = sum("torchobj" in file for file in files)
        before, found = found, [blocks, len(files) - blocks, len(os.listdir("/proc/self/task"))]
        same = same + 1 if found == before and "anon_inode:[pidfd]" not in files else 0
        if same == 5:
            return found
        PAUSE.wait(0.05)
    raise AssertionError(f"still changing, or a worker is still known: {found}")


def held():
    """Returns descriptors and threads after a few iterators and after many more."""
    # A pool of threads reads the files and grows with use.
    store = torchobj.Store("memory://held")
    for number in range(64):
        store.put(f"k{number:02}", bytes(SIZE))
    dataset = torchobj.ObjectMapDataset("memory://held/", transform=decoded)
    counts = []
    for number in range(31):
        loader = torchobj.DataLoader(dataset, batch_size=8, num_workers=2 if number % 5 == 0 else 0)
        for step, _ in enumerate(loader):
            if step == number % 10:
                break
        if number in (5, 30):
            del loader
            gc.collect()
            counts.append(settled())
    return counts


def holding():
    """200 epochs that hold and drop batches at random. Returns the memory in use after 50 and 200 epochs."""
    store = torchobj.Store("memory://holding")
    count = 64
    for number in range(count):
        store.put(f"k{number:02}", bytes([number]) * SIZE)
    dataset = torchobj.ObjectMapDataset("memory://holding/", transform=numbered)
    loader = torchobj.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    chance, batches, used = random.Random(1), [], []
    for epoch in range(1, 201):
        for numbers, tensors in loader:
            batches.append((numbers.tolist(), tensors))
            while len(batches) > 8 or (batches and chance.random() < 0.4):
                check(*batches.pop(chance.randrange(len(batches))))
        if epoch in (50, 200):
            used.append(sum(pss_bytes(pid) for pid in tree(os.getpid())))
    for batch in batches:
        check(*batch)
    return used


def numbered(reader):
    return int(reader.key[-2:]), torch.frombuffer(reader, dtype=torch.uint8)


def check(numbers, tensors):
    assert tensors.shape == (len(numbers), SIZE)
    assert torch.equal(tensors, torch.tensor(numbers, dtype=torch.uint8)[:, None].expand_as(tensors))


def main(folder, mode):
    if mode == "held":
        return held()
    if mode == "holding":
        return holding()
    ours = torchobj.ObjectMapDataset(f"file://{folder}/", transform=decoded)
    stock = peak(torch.utils.data.DataLoader, InMemory(len(ours)), mode == "breaks")
    return {"stock": stock, "ours": peak(torchobj.DataLoader, ours, mode == "breaks")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
