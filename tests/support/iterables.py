"""Numbered objects for tests of iterable datasets, and transforms that return the number."""

import itertools
import threading

from torch.utils.data import get_worker_info

import torchobj

COUNT = 300


def body(number):
    return f"body {number}".encode() * (1 + number)


def number_of(reader):
    return int(reader.key[-3:])


def number_and_worker(reader):
    assert bytes(reader) == body(number_of(reader))
    info = get_worker_info()
    return number_of(reader), 0 if info is None else info.id


def fails_for_seven(reader):
    if number_of(reader) == 7:
        raise ArithmeticError("seven")
    return number_of(reader)


def slow(reader):
    threading.Event().wait(0.05)
    return number_of(reader)


def write_objects(folder):
    for number in range(COUNT):
        (folder / f"k{number:03}").write_bytes(body(number))
    return folder


def dataset(folder, transform=number_of, *, enable_sharding=True, **settings):
    url = f"file://{folder}/"
    return torchobj.ObjectIterableDataset(url, transform=transform, enable_sharding=enable_sharding, **settings)


def numbers(loader):
    return [number for batch in loader for number in batch.tolist()]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))
