"""Run by `test_machine_limits.py`: a loader in a process that is limited before it uses anything.

Arguments: the folder, how workers are started, and the limits: `v=BYTES`, `f=BYTES`, or the name of a system call that is
forbidden. Prints what was found, as JSON.
"""

import ctypes
import json
import logging
import platform
import resource
import sys

#: Numbers of system calls per machine type.
CALLS = {
    "x86_64": {"memfd_create": 319, "eventfd2": 290},
    "aarch64": {"memfd_create": 279, "eventfd2": 19},
}


class Instruction(ctypes.Structure):
    """One instruction of a filter, as in linux/filter.h."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("when", ctypes.c_ubyte),
        ("otherwise", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class Program(ctypes.Structure):
    """A filter program, as in linux/filter.h."""

    _fields_ = (("count", ctypes.c_ushort), ("first", ctypes.POINTER(Instruction)))


def forbid(name):
    """Makes a system call fail with EPERM in this process and its children from now on."""
    filter_ = (Instruction * 4)(
        Instruction(0x20, 0, 0, 0),  # Load the number of the call.
        Instruction(0x15, 0, 1, CALLS[platform.machine()][name]),  # If it is another call, skip one instruction.
        Instruction(0x06, 0, 0, 0x0005_0000 | 1),  # SECCOMP_RET_ERRNO, EPERM.
        Instruction(0x06, 0, 0, 0x7FFF_0000),  # SECCOMP_RET_ALLOW.
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privs, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(Program(4, filter_)), 0, 0) == 0


class Messages(logging.Handler):
    """Collects log messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def first_byte(reader):
    return reader.read(1)[0]


def main(folder, context):
    import torchobj
    from torchobj import _torchobj

    messages = Messages()
    logging.getLogger("torchobj").addHandler(messages)
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=first_byte)
    errors, samples = [], []
    try:
        # The second dataset and the second epoch must not log anything more.
        for _ in range(2):
            loader = torchobj.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
            samples.append([sample for batch in loader for sample in batch.tolist()])
        for kind in (torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset):
            other = kind(f"file://{folder}/", transform=first_byte)
            samples.append([sample for batch in torchobj.DataLoader(other, batch_size=4) for sample in batch.tolist()])
        report = loader.report()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
        # Try again: no state is left that would hide the reason.
        try:
            _ = data[0]
        except Exception as again:
            errors.append(f"{type(again).__name__}: {again}")
        report = ""
    stats = _torchobj.prefetch_stats()
    found = {"samples": samples, "errors": errors, "log": messages.messages, "report": report, "stats": stats}
    print(json.dumps(found))


if __name__ == "__main__":
    for limit in sys.argv[3:]:
        if limit.startswith("v="):
            resource.setrlimit(resource.RLIMIT_AS, (int(limit[2:]), int(limit[2:])))
        elif limit.startswith("f="):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit[2:]), int(limit[2:])))
        else:
            forbid(limit)
    main(*sys.argv[1:3])
