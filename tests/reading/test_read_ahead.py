"""Reading ahead in threads, where there is no prefetcher."""

import threading

from tests.support.forking import in_child
from torchobj.reading.read_ahead import Group, read_ahead


class Reader:
    """Reads numbers. Threads read only after `opened` is set."""

    def __init__(self):
        self.opened = threading.Event()

    def source(self):
        return None

    def read(self, keys):
        if threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(60)
        return [10 * key for key in keys]


def test_a_forked_child_reads_what_a_thread_of_its_parent_was_reading():
    reader = Reader()
    groups = read_ahead(reader, lambda _: iter([Group([1, 2], 0), Group([3], 0), Group([4], 0)]))
    # The first group is requested together with the second one, which is being read during the fork.
    reader.opened.set()
    first = next(groups)
    reader.opened.clear()

    def rest():
        reader.opened = threading.Event()
        reader.opened.set()
        return [list(found) for _, found in groups]

    assert list(first[1]) == [10, 20]
    pending = read_ahead(reader, lambda _: iter([Group([1, 2], 0), Group([3], 0)]))
    reader.opened.set()
    assert in_child(rest) == "[[30], [40]]"
    assert [list(found) for _, found in groups] == [[30], [40]]
    assert [list(found) for _, found in pending] == [[10, 20], [30]]
