"""Tables of cases of which only some are in each run of `make test`: all are in `make matrix`."""

import pytest

#: For `pytest.mark.providers`: the test with GCS is in the matrix only.
GCS_IN_MATRIX = pytest.param("gs", marks=pytest.mark.matrix)


def often(count, cases):
    """The cases of `pytest.mark.parametrize`, the first `count` of which are in each run."""
    return [
        pytest.param(*case, marks=[] if number < count else pytest.mark.matrix)
        for number, case in enumerate(case if isinstance(case, tuple) else (case,) for case in cases)
    ]
