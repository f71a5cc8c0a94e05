"""Run by `test_loader.py`: batches larger than the budget, two alternating persistent loaders, and a save."""

import sys
from pathlib import Path

import torch

import torchobj

MIB = 1 << 20


def first_byte(reader):
    return reader.getbuffer()[0]


def main(folder):
    for number in range(48):
        (folder / f"k{number:02}").write_bytes(bytes([number]) * MIB)
    settings = {"batch_size": 32, "num_workers": 4, "persistent_workers": True}
    train, validation = (
        torchobj.DataLoader(torchobj.ObjectMapDataset(f"file://{folder}/k", transform=first_byte), **settings)
        for _ in range(2)
    )
    for _ in range(2):
        for step, batch in enumerate(train):
            if step == 0:
                assert batch.tolist() == list(range(32))
                found = [value for other in validation for value in other.tolist()]
                assert found == list(range(48))
                with torchobj.open(f"file://{folder}/saved/state.pt", "wb") as file:
                    torch.save(torch.zeros(2 * MIB), file)
    raw = torchobj.DataLoader(torchobj.ObjectMapDataset(f"file://{folder}/k"), batch_size=16, num_workers=4)
    everything = list(raw)
    assert [int(batch[index][-1]) for batch in everything for index in range(16)] == list(range(48))
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
