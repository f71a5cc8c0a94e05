"""Run by `test_removal_leftovers.py`: for each line of orders a child that saves by `StorageWriter`, to be killed."""

import dataclasses
import warnings

import torch
import torch.distributed.checkpoint as dcp

from tests.support.killing import serve
from torchobj import AdvancedOptions
from torchobj.checkpoint import StorageWriter

warnings.filterwarnings("ignore")


def save(orders):
    """Saves two files, one of them in parts."""
    config = dataclasses.replace(
        orders["config"], part_bytes=5 << 20, advanced=AdvancedOptions(whole_below_bytes=5 << 20)
    )
    writer = StorageWriter(orders["url"], config=config, thread_count=2)
    value = float(orders["value"])
    dcp.save({"x": torch.full((1_500_000,), value), "y": torch.full((10,), value)}, storage_writer=writer)


if __name__ == "__main__":
    serve(save)
