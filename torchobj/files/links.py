"""Keeps deletes below a folder of this machine: nothing behind a symbolic link, and empty folders with their files."""

import logging
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["remove_empty_folders", "without_links"]

logger = logging.getLogger("torchobj")


def without_links(folder: Path | None, names: Iterable[str]) -> list[str]:
    """Returns the names of files that are not reached through a symbolic link below the folder.

    Listings of a file store follow links, and torchobj creates none: a file behind a link belongs to another program.
    Folders behind links are logged.

    Args:
        folder: The folder of a file store, which may itself be a link; None for other stores.
        names: Paths relative to the folder.

    Returns:
        The names without those behind links, in order; all names if `folder` is None.
    """
    if folder is None:
        return list(names)
    real = folder.resolve()
    is_real: dict[PurePosixPath, bool] = {}
    kept = []
    for name in names:
        parent = PurePosixPath(name).parent
        if parent not in is_real:
            is_real[parent] = (real / parent).resolve() == real / parent
            if not is_real[parent]:
                logger.warning("%s: a symbolic link leads outside of %s; nothing is deleted there", parent, folder)
        if is_real[parent]:
            kept.append(name)
    return kept


def remove_empty_folders(root: Path | None, keys: Iterable[str]) -> None:
    """Removes empty folders of deleted files, except for the topmost ones below the root."""
    if root is None:
        return
    for key in keys:
        # The last two parents are the topmost folder and the root.
        for folder in list(PurePosixPath(key).parents)[:-2]:
            try:
                (root / folder).rmdir()
            except OSError:
                break
