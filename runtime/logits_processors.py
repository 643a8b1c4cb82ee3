"""Logits processors: the caller's own functions, which change a request's logits before each choice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Takes the tokens so far, the prompt's first, and the logits of the next one, float32 [vocab]; returns
#: logits of that shape, which may be the same array changed. -inf forbids a token.
LogitsProcessor = Callable[[list[int], "npt.NDArray[np.float32]"], Any]

#: How long ``close`` waits for a function that is in somebody else's code.
_JOIN_SECONDS = 1.0


class _Wish(Protocol):
    num_output: int
    tokens: Sequence[int]
    logits: npt.NDArray[np.float32]


class ProcessorCore(Protocol):
    """What ``_core.Engine`` has for processors."""

    def poll_logits(self, request_id: int) -> _Wish | None:
        """Wait for the request's next row of logits; None when the request has ended."""

    def give_logits(self, request_id: int, num_output: int, logits: npt.NDArray[np.float32]) -> None:
        """The row to choose from after ``num_output`` tokens."""

    def refuse_logits(self, request_id: int, num_output: int, reason: str) -> None:
        """There is none: the request ends with an error."""


class ProcessorThreads:
    """A thread for each request that has processors: one that takes long holds up no other's turn.

    The engine waits for it, with its step, some seconds at most; then the request ends with an error.
    """

    def __init__(self, core: ProcessorCore) -> None:
        self._core = core
        self._threads: dict[int, threading.Thread] = {}

    def start(self, request_id: int, prompt_ids: list[int], processors: Sequence[LogitsProcessor]) -> None:
        """Serve a request that has just been submitted, until it ends."""
        thread = threading.Thread(
            target=self._serve,
            args=(request_id, list(prompt_ids), processors),
            name=f"castiron-logits-{request_id}",
            daemon=True,
        )
        self._threads[request_id] = thread
        thread.start()

    def close(self) -> None:
        """Wait for the threads; the engine has been shut down."""
        for thread in list(self._threads.values()):
            thread.join(_JOIN_SECONDS)

    def _serve(self, request_id: int, tokens: list[int], processors: Sequence[LogitsProcessor]) -> None:
        core = self._core
        while (wish := core.poll_logits(request_id)) is not None:
            tokens.extend(wish.tokens)
            try:
                changed = _changed(processors, tokens, wish.logits)
            # Its own request ends with it, and no other. SystemExit too: without an answer the engine would
            # wait, and all requests with it.
            except BaseException as e:
                reason = f"the logits processor failed: {type(e).__name__}: {_text(e)}"
                core.refuse_logits(request_id, wish.num_output, reason)
            else:
                core.give_logits(request_id, wish.num_output, changed)
        self._threads.pop(request_id, None)


def _text(error: BaseException) -> str:
    """What an exception says, in characters that UTF-8 has."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # somebody else's __str__
        return "(its text cannot be made)"


def _changed(
    processors: Sequence[LogitsProcessor], tokens: list[int], logits: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    import numpy as np  # a tenth of a second of every start, where nobody has processors

    shape = logits.shape
    for process in processors:
        logits = np.asarray(process(list(tokens), logits))
        if logits.shape != shape or logits.dtype.kind not in "fiu":
            raise TypeError(
                f"it returned an array of shape {logits.shape} and type {logits.dtype}; expected numbers of "
                f"shape {shape}"
            )
        logits = np.ascontiguousarray(logits, dtype=np.float32)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise ValueError("it returned logits with NaN or +infinity; -infinity forbids a token")
    return logits
