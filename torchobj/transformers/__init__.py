"""The Trainer, the models and the tokenizers of transformers. Needs transformers installed.

`callbacks` has callbacks of the Trainer: look-ahead for its loaders, and logs. `pretrained` loads models and tokenizers
from a folder of a bucket and saves them there.
"""

from torchobj.transformers.callbacks import LoaderLogCallback, LookaheadCallback
from torchobj.transformers.pretrained import from_pretrained, save_pretrained

__all__ = ["LoaderLogCallback", "LookaheadCallback", "from_pretrained", "save_pretrained"]
