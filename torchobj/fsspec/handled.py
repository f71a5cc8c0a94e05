"""Tells an exception that `except` clauses handle from one that passes through `finally`, `with` or a generator.

Python has one answer for both, `sys.exc_info()`. They differ in the instructions of the functions on the stack: the
exception table of a function names its handlers, and a handler that is an `except` clause begins by comparing types.
"""

import dis
import sys
from types import FrameType
from typing import Any

__all__ = ["handlers_of", "only_iterators_ended"]

#: What `__next__` and `__anext__` raise at the end; to a program that handles them, nothing failed.
_ENDS = (StopIteration, StopAsyncIteration)


def only_iterators_ended(error: BaseException, known: BaseException | None) -> bool:
    """Returns whether the exceptions that are being handled are ends of iterators, and no exception passes.

    Args:
        error: What `sys.exc_info()` returns.
        known: An exception that may be handled in addition.

    Returns:
        False also if it cannot be told, as for functions that are not Python's.
    """
    each: BaseException | None = error
    seen = set[int]()
    while each is not None and each is not known and id(each) not in seen:
        seen.add(id(each))
        handlers = handlers_of(each)
        if handlers and not (isinstance(each, _ENDS) and all(handlers)):
            return False
        if each is error and not handlers:
            return False
        # Of an earlier exception, which may have been handled before this one was raised.
        each = each.__context__
    return True


def handlers_of(error: BaseException | None) -> list[bool]:
    """Returns for each handler that the outermost function which an exception has reached is in, the innermost first,
    whether it is an `except` clause. Empty if that function is not on the stack, or cannot be told.
    """
    reached = error.__traceback__.tb_frame if error is not None and error.__traceback__ is not None else None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not reached:
        frame = frame.f_back
    return [] if frame is None else _handlers(frame)


def _handlers(frame: FrameType) -> list[bool]:
    """Returns for each handler that a function is in, the innermost first, whether it is an `except` clause."""
    # typeshed does not have `exception_entries`.
    code: Any = dis.Bytecode(frame.f_code)
    instructions = {each.offset: each for each in code}
    handlers: list[bool] = []

    def target_of(offset: int) -> int | None:
        return next((each.target for each in code.exception_entries if each.start <= offset < each.end), None)

    def is_end(target: int) -> bool:
        # A handler is itself covered by instructions that restore the exception that was handled before.
        return (instructions[target].opname, instructions[target].arg) == ("COPY", 3)

    offset, visited = frame.f_lasti, set[int]()
    while offset not in visited:
        visited.add(offset)
        target = target_of(offset)
        if target is None:
            break
        if is_end(target):
            start = min(each.start for each in code.exception_entries if each.target == target)
            handlers.append(_is_except(list(instructions.values()), start))
        elif instructions[target].opname == "PUSH_EXC_INFO":
            # The function is in the block before this handler, and not in the handler.
            end = target_of(target)
            target = end if end is not None and is_end(end) else target
        offset = target
    return handlers


def _is_except(instructions: list[dis.Instruction], start: int) -> bool:
    """Returns whether the handler that starts at an offset is an `except` clause."""
    names = [each.opname for each in instructions if each.offset >= start]
    if names[0] != "PUSH_EXC_INFO":
        return False
    # Loads the types, and compares; `except:` drops the exception.
    after = next((name for name in names[1:] if not name.startswith(("LOAD_", "BUILD_TUPLE"))), "")
    return after == "CHECK_EXC_MATCH" or names[1] == "POP_TOP"
