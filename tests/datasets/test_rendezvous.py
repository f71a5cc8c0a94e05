"""Ranks find each other's listings by a number that each process group counts on its own."""

import torch.distributed

from torchobj.datasets.manifest_broadcast import _Group, _key


def number(store, name="s3://bucket/prefix"):
    return int(_key(_Group(0, store), name).rsplit("/", 1)[1])


def test_the_datasets_of_a_group_are_counted_by_name():
    store = torch.distributed.HashStore()
    assert [number(store), number(store), number(store, "another"), number(store)] == [1, 2, 1, 3]


def test_a_new_group_starts_counting_again_even_if_its_store_has_the_address_of_an_earlier_one():
    for _ in range(50):
        # Freed at once: the next group is likely to get its address.
        assert number(torch.distributed.HashStore()) == 1
