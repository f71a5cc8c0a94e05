"""Sets of keys of the benchmarks that list, and their files for the origin. Contacts no server."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


def digest(keys: Iterable[str]) -> str:
    """A digest of the set of keys, and of their number."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


@dataclass(frozen=True)
class KeySet:
    """The keys of a bucket."""

    name: str
    """Also that of its file and bucket."""
    keys: Sequence[str]

    def write(self, folder: Path) -> Path:
        """Writes the sorted keys to a file for `lab.origin`."""
        path = folder / self.name
        path.write_text("\n".join(self.keys) + "\n")
        return path


def flat(count: int, name: str = "flat") -> KeySet:
    """Numbered images below one prefix."""
    return KeySet(name, [f"train/{number:012d}.jpg" for number in range(count)])


def nested(count: int) -> KeySet:
    """1000 classes of ImageNet's form in two folders."""
    per_class = max(1, count // 2000)
    folders = [f"{part}/n{1_440_764 + 17 * number:08d}" for part in ("train", "val") for number in range(1000)]
    keys = [f"{folder}/n{7 * number:09d}.JPEG" for folder in folders for number in range(per_class)]
    return KeySet("nested", sorted(keys)[:count])
