"""End a program with a message, not a traceback: soon after Ctrl-C, or when a file is cut short.

Imported by the command line before everything else. Its imports are built into Python: `signal`,
`contextlib` and others are files, and while they are read Ctrl-C would show a traceback.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import types
    from typing import NoReturn
else:
    import _signal as signal

INTERRUPTED = 130  # exit code, as of a shell
NOTHING = "nothing was written"
STEP = "DMLTOOL_STEP"  # set in the environment of commands that another one runs
STDERR = 2  # the descriptor
AGAIN = 1.0  # seconds within which a second signal is taken for the first: launchers send it too

EVERY = 0.1  # seconds between looks whether an import is over

_when = 0.0  # of the first Ctrl-C; 0: none
_waiting = False  # for the end of an import
_looking = False  # the signal is our own, to see whether the import is over
_ended = False  # the command has
_patience = AGAIN  # seconds that Ctrl-C waits for the end of an import
_stderr = STDERR  # where the last words go
_main = _thread.get_ident()  # of the thread that runs commands


def left() -> str:
    """What to say when Ctrl-C ends a command; `console.on_interrupt` replaces this."""
    return NOTHING


def end_on_interrupt(name: str) -> None:
    """End without a traceback on Ctrl-C. `name`: the __name__ of the command line's module.

    Where that is imported by another program, such as a test, nothing is changed. A Ctrl-C that
    was blocked while Python started arrives here.
    """
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name != "__main__" and not program.startswith("dmltool"):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)  # else a background job, which Ctrl-C is not meant for
        sys.unraisablehook = _unraisable
        # All is done then, and Python would let the signal kill it while it cleans up.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class raised:
    """Inside, Ctrl-C raises KeyboardInterrupt, for a command to clean up; a second one ends it."""

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
    """Inside, Ctrl-C waits longer for an import to end, because there are results to keep."""

    def __enter__(self) -> None:
        global _patience
        _patience = 60.0

    def __exit__(self, *_: object) -> None:
        global _patience
        _patience = AGAIN


class captured:
    """Inside, descriptor 2 leads elsewhere, and `stderr` is a copy of what it was."""

    def __init__(self, stderr: int) -> None:
        self.stderr = stderr

    def __enter__(self) -> None:
        global _stderr
        self.before = _stderr
        if _stderr == STDERR:  # else it is captured already
            _stderr = self.stderr

    def __exit__(self, *_: object) -> None:
        global _stderr
        _stderr = self.before


def happened() -> bool:
    """Whether Ctrl-C was pressed: it is then the cause of later failures, such as of an import."""
    return _when > 0


def answered() -> None:
    """Stop waiting for the end of an import: Ctrl-C has been answered."""
    global _waiting
    _waiting = False


def interrupt() -> None:
    """Do to the main thread what Ctrl-C does."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(_main, signal.SIGINT)  # also wakes what sleeps
    else:  # Windows
        _thread.interrupt_main()


def say(text: str) -> None:
    """Write the last words of this process; they are shown also inside `captured`."""
    # Straight to the descriptor: another thread may hold the lock of sys.stderr.
    os.write(_stderr, text.encode("utf-8", "surrogateescape"))


def end(told: bool = False) -> NoReturn:
    """End this process as Ctrl-C does, at once; told: another process says how to continue."""
    try:
        if not told and _is_first():
            say(f"\nInterrupted: {left()}.\n")
    finally:
        os._exit(INTERRUPTED)


def _is_first() -> bool:
    """Whether this process is not the second or later one of torchrun or srun.

    Without imports, unlike `retrieval.distributed.world`, which knows more.
    """
    given = os.environ
    rank = given.get("RANK") if "WORLD_SIZE" in given else None
    if not rank and "SLURM_STEP_NUM_TASKS" in given:
        rank = given.get("SLURM_PROCID")
    return (rank or "0") == "0"


def _end(*_: object) -> None:
    end()


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
                _end()
            _looking = True
            interrupt()
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


def run_child(command: list[str]) -> int:
    """Run a command as a child process and return its exit code.

    After Ctrl-C it is killed if it does not end soon. Ctrl-C waits while Python starts in it, until
    `end_on_interrupt` lets it through. It ends when this process ends.
    """
    import ctypes
    import subprocess

    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        if libc is not None:
            libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL

    before = prepare if os.name == "posix" else None  # Windows cannot prepare a child
    child = subprocess.Popen(command, preexec_fn=before, env=os.environ | {STEP: "1"})
    try:
        code = child.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        for seconds in (0.2, 1.2):  # a terminal has sent Ctrl-C to the child as well
            try:
                child.wait(seconds)
                return INTERRUPTED
            except subprocess.TimeoutExpired:
                if before:  # Windows sends no signals
                    child.send_signal(signal.SIGINT)
        child.kill()
        child.wait()
        return INTERRUPTED


# Reading a page that a mapped file no longer has is a bus error, which ends a process without a
# word. A handler of Python's own cannot help: it runs after the instruction that fails, which never
# ends. This one is called by the system itself, on the spot.

_sizes: dict[str, int] = {}  # of mapped files, as they were when they were opened
_tells = False  # this process is a program of ours
_handler: object = None  # kept, or it would be collected and the system call into nothing


def tell_cut_files() -> None:
    """Name the file that is cut short; for programs: a library leaves signals alone."""
    global _tells
    _tells = True


def expect_size(path: str, size: int) -> None:
    """A file of this size is mapped from now on."""
    global _handler
    _sizes[os.path.abspath(path)] = size
    if _tells and _handler is None and hasattr(signal, "SIGBUS"):
        import ctypes

        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        install = ctypes.CDLL(None).signal
        install.argtypes, install.restype = [ctypes.c_int, kind], ctypes.c_void_p
        _handler = kind(_tell_cut_file)
        install(signal.SIGBUS, _handler)


def _tell_cut_file(_: int) -> None:
    try:
        cut = [p for p, size in _sizes.items() if os.path.exists(p) and os.path.getsize(p) < size]
        what = f"{cut[0]} was cut short while it was read." if cut else "A file cannot be read on."
        message = (
            f"\nError: {what}\n"
            "  Another program wrote to the file in place, or its disk is at fault.\n"
            "  Fix: Run the command again once the file is complete.\n"
        )
        say(message)
    finally:
        os._exit(1)
