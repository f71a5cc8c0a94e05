"""The Trainer, the models and the tokenizers of transformers. Needs transformers installed.

`callbacks` has callbacks of the Trainer for its loaders: look-ahead and logs. `checkpoints` commits its checkpoints in
a bucket. `pretrained` loads models and tokenizers from a folder of a bucket and saves them there.
"""

from torchobj.transformers.callbacks import LoaderLogCallback, LookaheadCallback
from torchobj.transformers.checkpoints import CheckpointCallback, latest_checkpoint
from torchobj.transformers.pretrained import from_pretrained, save_pretrained

__all__ = [
    "CheckpointCallback",
    "LoaderLogCallback",
    "LookaheadCallback",
    "from_pretrained",
    "latest_checkpoint",
    "save_pretrained",
]
