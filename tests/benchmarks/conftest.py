import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment():
    """Restores the environment, which a location of the benchmarks sets."""
    with mock.patch.dict(os.environ):
        yield
