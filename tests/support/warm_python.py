"""Python processes that need not import torch: `run` and `Process` stand for `subprocess.run([sys.executable, ...])` and
`subprocess.Popen`. They are forked from multiprocessing's forkserver, which has imported torch.

A test of what happens at the start of an interpreter, such as lazy imports, starts one itself.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, reduction

_context = multiprocessing.get_context("forkserver")


def start():
    """Starts the forkserver of this process. Workers that loaders start by it inherit the environment of this moment."""
    _context.set_forkserver_preload(["torch", "torchobj.loader", __name__])
    forkserver.ensure_running()


def run(arguments, *, input="", env=None, cwd=None, timeout=150, check=False):
    """Runs Python with `arguments`, such as `["-c", code]`, and returns a CompletedProcess with its output as text."""
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input)
        given.flush()
        given.seek(0)
        process = _started(arguments, env, cwd, (given, out, err))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, _text(out), _text(err))
        done = subprocess.CompletedProcess(arguments, process.exitcode, _text(out), _text(err))
    if check and done.returncode:
        raise AssertionError(f"{arguments} ended with {done.returncode}: {done.stderr}")
    return done


class Process:
    """A running Python process: `stdin` and `stdout` are text files of the test, what it writes to stderr is in `errors()`."""

    def __init__(self, arguments, *, env=None, cwd=None):
        child_in, own_in = os.pipe()
        own_out, child_out = os.pipe()
        self.stdin, self.stdout = open(own_in, "w"), open(own_out)
        self._err = tempfile.TemporaryFile()
        with open(child_in) as given, open(child_out, "w") as out:
            self._process = _started(arguments, env, cwd, (given, out, self._err))
        self.pid = self._process.pid

    def poll(self):
        """The exit status, that of subprocess, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout=150):
        """Waits for its end and returns the exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return self._process.exitcode

    def errors(self):
        """What it has written to stderr."""
        return _text(self._err)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdin.close()
        self.stdout.close()
        self._process.kill()
        self._process.join()
        self._err.close()


def _text(file):
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


class _Inherited:
    """A file descriptor that a child inherits."""

    def __init__(self, fd):
        self._fd = fd

    def __reduce__(self):
        return _detached, (reduction.DupFd(self._fd),)


def _detached(duplicate):
    return duplicate.detach()


def _started(arguments, env, cwd, files):
    environment = dict(os.environ if env is None else env)
    inherited = [_Inherited(file.fileno()) for file in files]
    process = _context.Process(
        target=_main, args=([os.fspath(argument) for argument in arguments], environment, cwd or os.getcwd(), inherited)
    )
    process.start()
    return process


def _main(arguments, environment, folder, files):
    """What an interpreter does between its start and its end."""
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", closefd=False),
        open(2, "w", 1, closefd=False),
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers of the program are started as by an interpreter, not by the forkserver.
    multiprocessing.set_start_method(None, force=True)
    status = _status(arguments)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _status(arguments):
    """Runs the program and returns its exit status, having printed what it ended with."""
    try:
        if arguments[0] == "-c":
            sys.argv, sys.path[0:0] = ["-c", *arguments[2:]], [""]
            program = type(sys)("__main__")
            sys.modules["__main__"] = program
            exec(compile(arguments[1], "<string>", "exec"), program.__dict__)
        elif arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0:0] = arguments, [os.path.dirname(arguments[0])]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
