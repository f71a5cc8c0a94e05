"""Folders of files that tests compare."""

import os


def content(folder):
    """The bytes of all files below a folder, by their relative paths."""
    return {os.fspath(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
