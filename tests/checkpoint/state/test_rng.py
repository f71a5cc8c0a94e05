"""The states of random number generators."""

import logging

import pytest
import torch

from torchobj import exceptions
from torchobj.checkpoint import RngState


def test_a_rank_that_the_saving_job_did_not_have_keeps_its_generators(caplog, monkeypatch):
    state = RngState().state_dict()
    monkeypatch.setattr("torchobj.checkpoint.state.rng._distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with caplog.at_level(logging.WARNING, "torchobj"):
        before = torch.get_rng_state()
        RngState().load_state_dict(state)
        assert torch.equal(torch.get_rng_state(), before)
    assert "rank 3 keeps its random generators: the checkpoint has those of 1 ranks" in caplog.text
    with pytest.raises(exceptions.CheckpointError, match="this is not a state of an RngState"):
        RngState().load_state_dict({"ranks": "[["})
