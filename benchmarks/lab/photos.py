"""JPEG files of about 110 KiB as a family of objects, and their decoding to training samples. Stores nothing."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.lab.objects import Family

CROP = 224
WIDTH, HEIGHT = 640, 480


@dataclass(frozen=True)
class Photos(Family):
    """JPEG files. `size` is that of a decoded sample."""

    @property
    def name(self) -> str:
        return "photos/"

    def is_stored(self, path: Path) -> bool:
        return path.exists()

    def pieces(self, index: int) -> Iterator[bytes | memoryview]:
        """A picture of 640 x 480 pixels with structure at several scales."""
        from PIL import Image

        random = np.random.default_rng(index)
        picture = np.zeros((HEIGHT, WIDTH, 3))
        for scale in (4, 16, 80):
            cells = random.uniform(0, 255, (HEIGHT // scale, WIDTH // scale, 3))
            picture += cells.repeat(scale, axis=0).repeat(scale, axis=1) / 3
        file = io.BytesIO()
        Image.fromarray(picture.astype(np.uint8)).save(file, "JPEG", quality=80)
        yield file.getvalue()


def photos(count: int) -> Photos:
    """Photos whose samples are float crops of 3 x 224 x 224."""
    return Photos(3 * CROP * CROP * 4, count)


def _cropped(picture: torch.Tensor) -> torch.Tensor:
    """A float crop of uint8 pixels, channels first: the middle half, resized."""
    middle = picture[:, HEIGHT // 4 : -HEIGHT // 4, WIDTH // 4 : -WIDTH // 4].unsqueeze(0).float() / 255
    return functional.interpolate(middle, (CROP, CROP), mode="bilinear").squeeze(0)


def by_pillow(content: Any) -> torch.Tensor:
    """Decodes with Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return _cropped(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))


def by_torchvision(content: Any) -> torch.Tensor:
    """Decodes with torchvision."""
    from torchvision.io import ImageReadMode, decode_jpeg

    return _cropped(decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB))


DECODERS: dict[str, Callable[[Any], torch.Tensor]] = {"Pillow": by_pillow, "torchvision": by_torchvision}


@cache
def sample(decoder: str, index: int) -> torch.Tensor:
    """The sample that every feed must return for a photo."""
    return DECODERS[decoder](b"".join(photos(0).pieces(index)))
