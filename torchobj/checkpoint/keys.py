"""Which keys of checkpoints are safe to use as paths, and the folders of a store of files. Deletes no file."""

import logging
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["is_canonical", "remove_empty_folders", "without_links"]

logger = logging.getLogger("torchobj")


def is_canonical(path: str) -> bool:
    """Whether a path stays below the folder where it begins, whatever store interprets it."""
    try:
        # A lone surrogate, which JSON can carry, has no UTF-8 form.
        path.encode()
    except UnicodeEncodeError:
        return False
    return not {"", ".", ".."} & set(path.split("/")) and "\\" not in path and "\0" not in path


def without_links(folder: Path | None, names: Iterable[str]) -> list[str]:
    """The names whose files really lie where the names say: no symbolic link leads there from the folder.

    Listings of a store of files follow links, and torchobj creates none: a file behind a link belongs to somebody else.
    Names that are left out are logged.

    Args:
        folder: The folder of a store of files, which may itself be reached by a link; None in other stores.
        names: Paths relative to the folder.

    Returns:
        The other names, in their order; all names where `folder` is None.
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
    """Removes the folders of files that were deleted, where they are empty: all but the topmost below the root."""
    if root is None:
        return
    for key in keys:
        # The last two are the topmost folder and the root.
        for folder in list(PurePosixPath(key).parents)[:-2]:
            try:
                (root / folder).rmdir()
            except OSError:
                break
