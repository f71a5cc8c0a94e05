"""`SharedTable`: one copy of an Arrow table for a trainer and its workers."""

import copy
import multiprocessing
import os
import pickle
import sys

import pytest
import torch

from torchobj.workers.shared_table import SharedTable

pa = pytest.importorskip("pyarrow")

TABLE = {"url": ["a", None, "é"], "label": [1, 2, None], "parts": [[1], [], None]}


def chunked():
    """A table of two chunks, with a dictionary and metadata."""
    table = pa.table({**TABLE, "kind": pa.array(["x", "y", "x"]).dictionary_encode()})
    return pa.concat_tables([table, table.slice(1)]).replace_schema_metadata({"source": "test"})


def test_rows_and_values_are_python_objects():
    shared = SharedTable(chunked())
    assert len(shared) == 5
    assert shared.row(2) == {"url": "é", "label": None, "parts": None, "kind": "x"}
    assert shared.value("label", 4) is None
    assert [shared.row(row) for row in range(5)] == chunked().to_pylist()
    assert repr(shared) == "<SharedTable, 5 rows, columns: url, label, parts, kind>"
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            shared.row(wrong)
    with pytest.raises(KeyError):
        shared.value("name", 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_pickle_is_a_copy(copied):
    shared = SharedTable(chunked())
    other = copied(shared)
    assert other.table.equals(shared.table, check_metadata=True)
    assert len(copied(SharedTable(chunked().slice(0, 0)))) == 0


class Rows(torch.utils.data.Dataset):
    """Rows with the file that contains their memory."""

    def __init__(self, *tables):
        self.tables = tables

    def __len__(self):
        return len(self.tables[0])

    def __getitem__(self, index):
        return index, [table.row(index) for table in self.tables], os.getpid(), [file_of(each) for each in self.tables]


def file_of(shared):
    """Inode and permissions of the mapping that contains the values of the first column; None if it is private."""
    address = shared.table.column(0).chunk(0).buffers()[2].address
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _, _, inode, *name = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return [inode, permissions] if name[:1] == ["/memfd:torchobj-table"] else None
    raise AssertionError(address)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_workers_have_no_copies(method):
    shared, second = SharedTable(chunked()), SharedTable(chunked())
    loader = torch.utils.data.DataLoader(
        Rows(shared, second, shared), num_workers=2, batch_size=None, multiprocessing_context=method
    )
    for _ in range(2):
        samples = list(loader)
        assert [rows for _, rows, _, _ in samples] == [[row] * 3 for row in chunked().to_pylist()]
        assert len({process for _, _, process, _ in samples}) == 2
        files = [file_of(shared), file_of(second), file_of(shared)]
        assert [found for _, _, _, found in samples] == [files] * len(samples)
    if method == "fork":
        assert files == [None] * 3
    else:
        assert files[0] != files[1]
        assert {permissions for _, permissions in files} == {"r--s"}


def read_rows(shared, queue):
    queue.put([shared.row(row) for row in range(len(shared))])


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_worker_passes_the_table_on_to_a_process_of_its_own(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    first = context.Process(target=pass_on, args=(SharedTable(chunked()), queue))
    first.start()
    assert queue.get(timeout=240) == chunked().to_pylist()
    first.join(100)
    assert first.exitcode == 0


def pass_on(shared, queue):
    second = multiprocessing.get_context("spawn").Process(target=read_rows, args=(shared, queue))
    second.start()
    second.join(100)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_a_deleted_table_leaves_no_descriptor():
    before = len(descriptors())
    shared = SharedTable(chunked())
    shared._descriptor()
    assert len(descriptors()) > before
    del shared
    assert len(descriptors()) == before


def descriptors():
    """The descriptors of this process for the memory of tables."""
    return [entry for entry in os.scandir("/proc/self/fd") if "torchobj-table" in os.path.realpath(entry.path)]
