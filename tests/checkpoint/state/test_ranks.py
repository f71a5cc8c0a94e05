"""The ranks of a job, or the only one."""

import pytest

from torchobj.checkpoint.state import ranks


def test_without_torch_distributed_there_is_one_rank():
    alone = ranks.Ranks()
    assert (alone.several, alone.is_first, alone.group, alone.of_first(lambda: 3)) == (False, True, None, 3)
    alone.agree(None)
    with pytest.raises(KeyError):
        alone.agree(KeyError("k"))
