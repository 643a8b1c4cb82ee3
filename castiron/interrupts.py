"""Ctrl-C at any time: one line, exit code 130, nothing left behind. The handler that is set is the state.

Python's own handler raises at every signal: also while the first one's ``finally`` blocks are at work, in
destructors, which swallow it, and before there is anybody who could catch it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

#: Seconds in which another Ctrl-C does not end the process before it has tidied up.
PATIENCE: Final = 5.0
#: Seconds after which one comes again that came when it could not be raised, and for how long it may be so.
_AGAIN: Final = 0.01
_LONGEST_IMPORT: Final = 20.0
_IMPORTLIB: Final = "<frozen importlib._bootstrap>"
EXIT_CODE: Final = 130


class Interrupted(KeyboardInterrupt):
    """A subclass: CPython ends by the signal, whatever the exit code, where code made by ``exec`` (that of a
    dataclass) was left by KeyboardInterrupt itself.
    """


def leave_at_once(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Handler for the time in which nothing needs tidying: say so and exit."""
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)


class _Raising:
    """Handler that raises Interrupted in the main thread, and leaves later signals to ``_Tidying``.

    Not while a module is imported, but right after: many in C++ end the process when an exception comes out
    of Python in the midst of that.
    """

    def __init__(self) -> None:
        self._came: float | None = None

    def __call__(self, _signal: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._came = self._came or now
        if _is_importing(frame) and now < self._came + _LONGEST_IMPORT:
            _come_again()
            return
        signal.signal(signal.SIGINT, _Tidying(interrupted=True))
        raise Interrupted


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


def _come_again() -> None:
    # From a thread: a signal that this one sends itself is handled where it is.
    threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()


class _Tidying:
    """Handler for the time after the first Ctrl-C, or after the work: no signal for a while, then the end."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self._ends = time.monotonic() + PATIENCE

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._ends:
            leave_at_once(number, frame)


def at_start() -> None:
    """Take Ctrl-C over, unless it is ignored (nohup) or somebody has done so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
        # Registered first, it is called last. The interpreter's own end would put the signal's default back,
        # and another Ctrl-C take the place of the exit code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


@contextmanager
def raised() -> Iterator[None]:
    """Ctrl-C raises Interrupted inside, once, where ``at_start`` has taken it over.

    What leaves the block is Interrupted then, too: modules written in C (``pydantic_core``, the compiler of
    ``"\\N{...}"``) make errors of their own of it, and some swallow it.
    """
    if signal.getsignal(signal.SIGINT) is not leave_at_once:
        yield
        return
    before, sys.unraisablehook = sys.unraisablehook, _Again(sys.unraisablehook)
    try:
        signal.signal(signal.SIGINT, _Raising())
        yield
    finally:
        handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, _Tidying(interrupted=False))
        sys.unraisablehook = before
        if isinstance(handler, _Tidying) and handler.interrupted:
            raise Interrupted from None


class _Again:
    """Hook for exceptions that cannot be raised where they came up: an Interrupted comes again."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __call__(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, Interrupted):
            self._other(unraisable)
            return
        signal.signal(signal.SIGINT, _Raising())
        _come_again()
