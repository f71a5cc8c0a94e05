"""The file system for fsspec: fsspec's own conformance suite, and what it leaves open."""

import pickle

import fsspec
import pytest
from fsspec.implementations.local import make_path_posix
from fsspec.tests import abstract

import torchobj
from torchobj import exceptions
from torchobj.fsspec import ObjectFileSystem


class InMemory(ObjectFileSystem):
    protocol = "memory"


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self):
        return InMemory()

    @pytest.fixture
    def fs_path(self):
        return "conformance/folder"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def local_path(self, tmp_path):
        return make_path_posix(str(tmp_path))


class TestCopying(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGetting(Fixtures, abstract.AbstractGetTests):
    pass


class TestPutting(Fixtures, abstract.AbstractPutTests):
    pass


class TestPiping(Fixtures, abstract.AbstractPipeTests):
    pass


class TestOpening(Fixtures, abstract.AbstractOpenTests):
    pass
