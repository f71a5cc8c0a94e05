"""Run by `test_loader_kept.py`: workers and the trainer keep tensors of what workers return, and verify them."""

import collections
import sys
from pathlib import Path

import torch

import torchobj

COUNT, SIZE, EPOCHS = 100, 300_000, 2


class Keeper:
    """Returns the reader, keeps a tensor of its bytes for a while, and verifies those that it keeps."""

    def __init__(self):
        self.kept = collections.deque(maxlen=8)

    def __call__(self, reader):
        for number, tensor in self.kept:
            if not bool((tensor == number).all()):
                raise AssertionError(f"the worker's tensor of object {number} changed")
        self.kept.append((int(reader.key[-3:]), torch.frombuffer(reader, dtype=torch.uint8)))
        return reader


def main(folder):
    torch.set_num_threads(1)
    for number in range(COUNT):
        (folder / f"k{number:03}").write_bytes(bytes([number]) * SIZE)
    data = torchobj.ObjectMapDataset(f"file://{folder}/k", transform=Keeper())
    loader = torchobj.DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    kept, failed, checks = collections.deque(maxlen=4), 0, 0
    for _ in range(EPOCHS):
        for batch in loader:
            kept += [(int(url[-3:]), batch[index]) for index, url in enumerate(batch.urls)]
            failed += sum(not bool((tensor == number).all()) for number, tensor in kept)
            checks += len(kept)
    print(f"{failed} of {checks} checks of the trainer failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
