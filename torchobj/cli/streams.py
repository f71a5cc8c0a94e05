"""The standard streams of the program: those that are closed at its start, and errors that name the stream.

The next file or socket would get the number of a closed stream, and receive the output. Its descriptor is opened here
for the other direction, so that its use fails as that of a closed one. Messages are the exception: where they cannot be
written, they are discarded, and the command does its work.
"""

import io
import os
import sys
from typing import Any

from typing_extensions import override

_NAMES = ("standard input", "standard output", "standard error")
_STDERR = 2


class _Stream(io.FileIO):
    """A standard stream, by its descriptor."""

    is_pipe_broken = False
    """Whether a write found that the reader of its pipe has ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb" if number else "rb", closefd=False)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, _NAMES[self.fileno()])

    @override
    def readinto(self, buffer: Any, /) -> Any:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._named(error) from None

    @override
    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            _Stream.is_pipe_broken = True
            raise
        except OSError as error:
            if self.fileno() == _STDERR:
                return memoryview(data).nbytes
            raise self._named(error) from None


def open_streams() -> None:
    """Makes the standard streams of Python, before anything else is opened."""
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, flags), True)  # noqa: FBT003  positional only
    out: Any = sys.stdout
    is_shown_at_once = out is not None and (out.line_buffering or out.write_through)
    sys.stdin = _text(io.BufferedReader(_Stream(0)), sys.stdin)
    # Keys may contain characters that the encoding of the stream lacks.
    sys.stdout = _text(io.BufferedWriter(_Stream(1)), out, "backslashreplace", line_buffering=is_shown_at_once)
    sys.stderr = _text(io.BufferedWriter(_Stream(_STDERR)), sys.stderr, "backslashreplace", line_buffering=True)


def is_pipe_broken() -> bool:
    """Whether the reader of the output or of the messages has ended."""
    return _Stream.is_pipe_broken


def _text(
    binary: io.BufferedReader | io.BufferedWriter, like: Any, errors: str | None = None, *, line_buffering: bool = False
) -> io.TextIOWrapper:
    """A stream of text with the encoding of another one, if that is open."""
    encoding, given = (None, None) if like is None else (like.encoding, like.errors)
    return io.TextIOWrapper(binary, encoding, errors or given, newline="\n", line_buffering=line_buffering)
