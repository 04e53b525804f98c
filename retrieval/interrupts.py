"""End a program soon after Ctrl-C, without a traceback.

Imported by the command line before everything else. Its imports are built into Python: `signal`,
`contextlib` and others are files, and while they are read Ctrl-C would show a traceback.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import types
else:
    import _signal as signal

INTERRUPTED = 130  # exit code, as of a shell
STEP = "DMLTOOL_STEP"  # set in the environment of commands that another one runs
LISTENS = "DMLTOOL_LISTENS"  # set where these start deaf to Ctrl-C but are to end with it
AGAIN = 1.0  # seconds within which a second signal is taken for the first: launchers send it too

EVERY = 0.1  # seconds between looks whether an import is over

_when = 0.0  # of the first Ctrl-C; 0: none
_waiting = False  # for the end of an import
_looking = False  # the signal is our own, to see whether the import is over
_ended = False  # the command has
_patience = AGAIN  # seconds that Ctrl-C waits for the end of an import
_main = _thread.get_ident()  # of the thread that runs commands


def watch(name: str) -> None:
    """Shows no traceback from now on; `name` is the __name__ of the command line's module.

    Where that is imported by another program, such as a test, nothing is changed.
    """
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name != "__main__" and not program.startswith("dmltool"):
        return
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual and LISTENS not in os.environ:
        return  # a background job, which Ctrl-C is not meant for
    signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = _unraisable


class raised:
    """Ctrl-C raises KeyboardInterrupt inside, for a command to clean up; pressed again, it ends."""

    def __init__(self) -> None:
        self.ours = signal.getsignal(signal.SIGINT) is _end

    def __enter__(self) -> None:
        if self.ours:
            signal.signal(signal.SIGINT, _raise)

    def __exit__(self, *_: object) -> None:
        global _ended
        if self.ours:
            _ended = True
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


class patient:
    """Ctrl-C waits longer for the end of an import inside: there are results to keep."""

    def __enter__(self) -> None:
        global _patience
        _patience = 60.0

    def __exit__(self, *_: object) -> None:
        global _patience
        _patience = AGAIN


def deaf() -> bool:
    """Started so that Ctrl-C is not meant for it, as a shell starts background jobs."""
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def happened() -> bool:
    """Ctrl-C was pressed; what fails after that, such as an import, fails because of it."""
    return _when > 0


def _end(*_: object) -> None:
    os.write(2, b"\nInterrupted: nothing was written.\n")
    os._exit(INTERRUPTED)


def _raise(_: int, frame: types.FrameType | None) -> None:
    global _when, _waiting, _looking
    own, _looking = _looking, False
    if own and not _waiting:
        return
    if _when and not own:  # pressed again
        if time.monotonic() - _when > AGAIN:
            os._exit(INTERRUPTED)
    elif not _importing(frame):
        _when, _waiting = _when or time.monotonic(), False
        raise KeyboardInterrupt
    elif not _waiting:
        _when, _waiting = time.monotonic(), True
        _wait()


def _importing(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _wait() -> None:
    """Waits for the end of an import, for a second unless `patient`: raised inside, the exception
    may be dropped by the module or end the program in C++.
    """

    def wait() -> None:
        global _looking
        time.sleep(EVERY)
        while _waiting and not _ended:
            if time.monotonic() - _when > _patience:
                os.write(2, b"\nInterrupted.\n")
                os._exit(INTERRUPTED)
            _looking = True
            signal.pthread_kill(_main, signal.SIGINT)  # also wakes what sleeps
            time.sleep(EVERY)

    _thread.start_new_thread(wait, ())


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    """Python drops exceptions that are raised in a destructor or a callback, also Ctrl-C."""
    global _waiting
    if isinstance(args.exc_value, KeyboardInterrupt):
        _waiting = True
        _wait()
    else:
        sys.__unraisablehook__(args)


def run_child(command: list[str], patience: float = 1.2) -> int:
    """Run a command as a child process and return its exit code.

    After Ctrl-C it is killed if it does not end soon. It ignores Ctrl-C while Python starts, and
    ends when this process ends.
    """
    import ctypes
    import subprocess

    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL

    before = prepare if os.name == "posix" else None  # Windows cannot prepare a child
    env = os.environ | {STEP: "1"} | ({} if deaf() else {LISTENS: "1"})
    child = subprocess.Popen(command, preexec_fn=before, env=env)
    try:
        code = child.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        for number, seconds in ((0, 0.2), (signal.SIGINT, patience)):  # terminals send it as well
            child.send_signal(number)
            try:
                child.wait(seconds)
                return INTERRUPTED
            except subprocess.TimeoutExpired:
                continue
        child.kill()
        child.wait()
        return INTERRUPTED
