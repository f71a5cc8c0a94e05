"""Run by `test_loader_bad_input.py` in a process whose budget is small: prints samples, log and figures as JSON."""

import json
import logging
import os
import select
import sys

import torchobj
from torchobj import _torchobj

LOG = []
KEPT = []
#: Readable, also in workers, when the shortage was logged.
WARNED, WARN = os.pipe()


class Kept(logging.Handler):
    def emit(self, record):
        LOG.append(record.getMessage())
        if "no memory to read ahead" in LOG[-1]:
            os.write(WARN, b"x")


def first_byte(reader):
    return reader.getbuffer()[0]


def keeps(reader):
    # The shortage is logged at the first read after ten seconds of it: the objects last longer than that.
    select.select([WARNED], [], [], 0.15)
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
