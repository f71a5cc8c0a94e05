"""Guesses content types of uploads from names, as the standard library does."""

import mimetypes

__all__ = ["guessed_type", "types_by_end"]


def guessed_type(*names: str) -> str | None:
    """The content type of the first name or path that has one; that of a compressed file is the type of its content.

    Example:
        >>> guessed_type("a/b.json"), guessed_type("part-1", "x.png"), guessed_type("Makefile")
        ('application/json', 'image/png', None)
    """
    # With `./` a name is not taken as a URL such as `data:`.
    return next((kind for name in names if (kind := mimetypes.guess_type(f"./{name}")[0])), None)


def types_by_end() -> dict[str, str]:
    """The content types of names by their ends, such as `.txt` and `.txt.gz`."""
    mimetypes.init()
    compressed = (f"{end}{encoding}" for end in mimetypes.types_map for encoding in mimetypes.encodings_map)
    ends = (*mimetypes.types_map, *mimetypes.suffix_map, *compressed)
    return {end: kind for end in ends if (kind := guessed_type(f"x{end}"))}
