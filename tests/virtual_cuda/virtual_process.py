"""Runs a function in a process of its own: a process has one virtual device, which may crash it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")
_HERE = Path(__file__).parent


class ScenarioError(AssertionError):
    """The function raised, crashed or took too long; the text holds its traceback."""


def in_process(function: Callable[..., T], *args: Any, timeout: float = 120, **kwargs: Any) -> T:
    """What ``function`` (of a module's top level) returns in a fresh process. Raises ScenarioError."""
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise ScenarioError(f"{function.__name__} took more than {timeout:g} s")
        outcome, result = ours.recv()
    except EOFError:
        process.join(10)
        raise ScenarioError(f"{function.__name__} crashed with exit code {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(5)
            process.kill()
    if outcome == "raised":
        raise ScenarioError(result)
    return result  # type: ignore[no-any-return]


def _context() -> Any:
    # A server that has imported the slow modules forks the children: they start in milliseconds.
    context = multiprocessing.get_context("forkserver")
    folders = [str(_HERE), str(_HERE.parent / "plugins" / "cuda")]
    path = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = {
        "PYTHONPATH": os.pathsep.join([*folders, *path]),
        # The matrices are tiny: a thread pool costs more than it gives, most of all beside other tests.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, environment):
        context.set_forkserver_preload(["virtual_interpreter"])
        forkserver.ensure_running()
    return context


def _child(connection: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        message = ("returned", function(*args, **kwargs))
    except BaseException:
        message = ("raised", traceback.format_exc())
    connection.send(message)
    connection.close()
    sys.stdout.flush()
    # Without the interpreter's shutdown: what a test leaves on the device is the test's matter.
    os._exit(0)
