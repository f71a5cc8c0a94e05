"""Run by `test_loader_bad_input.py` in a process whose budget is small: prints samples, log and figures as JSON."""

import json
import logging
import sys
import time

import torchobj
from torchobj import _torchobj

LOG = []
KEPT = []


class Kept(logging.Handler):
    def emit(self, record):
        LOG.append(record.getMessage())


def first_byte(reader):
    return reader.getbuffer()[0]


def keeps(reader):
    # Long enough that memory is short for more than ten seconds.
    time.sleep(0.12)
    KEPT.append(reader.getbuffer())
    return KEPT[-1][0]


def main(mode, folder):
    logging.getLogger("torchobj").addHandler(Kept())
    what, workers = mode.split("-")
    transform, epochs = (first_byte, 2) if what == "large" else (keeps, 1)
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)
    loader = torchobj.DataLoader(data, batch_size=4, num_workers=min(1, int(workers)))
    samples = [value for _ in range(epochs) for batch in loader for value in batch.tolist()]
    over_budget = _torchobj.prefetch_stats()["over_budget"]
    print(json.dumps({"samples": samples, "log": LOG, "over_budget": over_budget}))


if __name__ == "__main__":
    main(*sys.argv[1:])
