"""A `torch.save` that fails leaves the previous object, whatever it writes through.

`tests/store/test_writer.py` has `S3Checkpoint.writer`, and `tests/frameworks/test_lightning.py` the Lightning plugin.
"""

import pytest
import torch

import torchobj
from torchobj import exceptions


@pytest.mark.parametrize("way", ["open", "fsspec"])
def test_a_failed_save_without_a_with_block_is_an_error_at_close_and_keeps_the_object(bucket, way):
    url = f"{bucket.url}/ckpt.pt"
    torchobj.save({"step": 1}, url, config=bucket.config)
    file = torchobj.open(url, "wb", config=bucket.config) if way == "open" else bucket.files.open(url, "wb")
    with pytest.raises(Exception, match="lambda"):
        torch.save({"step": 2, "bad": lambda: 1}, file)
    with pytest.raises(exceptions.CheckpointError, match=f"^{url}: torch.save failed: nothing was written$"):
        file.close()
    assert file.closed
    assert torchobj.load(url, config=bucket.config) == {"step": 1}
