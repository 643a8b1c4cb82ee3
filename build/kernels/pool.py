"""Worker processes that compile kernels, one for each CPU of this machine."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO

from castiron.errors import BuildError

from .job import Compiled, CudaJob, TritonJob

_START = "import sys; sys.path[:] = {path!r}; from castiron.build.kernels.worker import main; main()"


class Worker:
    """A process that compiles one kernel after the other.

    A process of its own and not ``multiprocessing``: it works from a script without a main guard, and a
    compiler that crashes takes nothing with it.
    """

    def __init__(self) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            if stream is not None:
                stream.close()

    def compile(self, job: TritonJob | CudaJob, label: str) -> Compiled:
        """Raises BuildError that names the kernel and gives the compiler's words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            compiled, words = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._words.seek(0)
            tail = self._words.read()[-2000:].decode(errors="replace").strip()
            code = self._process.wait()
            raise BuildError(f"the compiler of kernel {label} ended with code {code}:\n{tail}") from None
        if compiled is None:
            raise BuildError(f"kernel {label} does not compile:\n{words}")
        assert isinstance(compiled, Compiled)
        return compiled


def compile_all(
    jobs: Sequence[tuple[TritonJob | CudaJob, str]], done: Callable[[int, Compiled], None]
) -> None:
    """Compile (job, label) pairs side by side, relatives in a row.

    ``done`` gets index and result, in this thread. Raises BuildError for the first kernel that fails; those
    that wait are given up.
    """
    families: dict[str, list[int]] = {}
    for index, (job, _) in enumerate(jobs):
        families.setdefault(job.relatives, []).append(index)
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    # The last first: what takes longest, attention and sampling, comes late in a program, and a long job that
    # starts when all others are done has the machine to itself.
    for family in reversed(families.values()):
        waiting.put(family)
    answers: queue.SimpleQueue[tuple[int, Compiled] | BaseException | None] = queue.SimpleQueue()

    def serve() -> None:
        try:
            with Worker() as worker:
                while (family := _next(waiting)) is not None:
                    for index in family:
                        answers.put((index, worker.compile(*jobs[index])))
        except BaseException as error:
            answers.put(error)
        else:
            answers.put(None)

    running = min(len(families), cpus())
    failure: BaseException | None = None
    with ThreadPoolExecutor(max(1, running), "castiron-compile") as threads:
        for _ in range(running):
            threads.submit(serve)
        try:
            while running:
                answer = answers.get()
                if isinstance(answer, tuple):
                    done(*answer)
                    continue
                running -= 1
                if answer is not None:
                    failure = failure or answer
                    _drain(waiting)
        finally:
            _drain(waiting)
    if failure is not None:
        raise failure


def _next(waiting: queue.SimpleQueue[list[int]]) -> list[int] | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _drain(waiting: queue.SimpleQueue[list[int]]) -> None:
    while _next(waiting) is not None:
        pass


def cpus() -> int:
    """CPUs that this process may use."""
    known = getattr(os, "sched_getaffinity", None)  # Linux: what this process may use
    return len(known(0)) if known is not None else os.cpu_count() or 1
