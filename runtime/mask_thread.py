"""The thread that tells the engine which tokens each grammar allows next, while the engine's steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .grammar import Matcher

_POLL_SECONDS = 0.1


class _Wish(Protocol):
    request_id: int
    num_output: int
    tokens: Sequence[int]
    drafts: Sequence[int]


class MaskCore(Protocol):
    """What ``_core.Engine`` has for masks."""

    def poll_masks(self, timeout: float) -> Sequence[_Wish]:
        """Requests with new tokens or drafts, waiting up to ``timeout`` seconds for some."""

    def give_masks(
        self, request_id: int, num_output: int, num_drafts: int, masks: npt.NDArray[np.uint32]
    ) -> None:
        """Masks [n, words]: for the token after ``num_output`` tokens, and for that behind each of the drafts
        asked for, or of the first of them."""

    def refuse_mask(self, request_id: int, num_output: int, reason: str) -> None:
        """There is none: the request ends with an error."""


class MaskThread:
    """Matchers of the running requests, moved on as their tokens come."""

    def __init__(self, core: MaskCore) -> None:
        self._core = core
        self._matchers: dict[int, Matcher] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, matcher: Matcher, submit: Callable[[], int]) -> int:
        """Call ``submit``, which queues a request, and serve its masks from then on; returns its id."""
        # Held across both, so that no wish of the request can come before its matcher is known.
        with self._lock:
            request_id = submit()
            self._matchers[request_id] = matcher
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="castiron-grammar", daemon=True)
                self._thread.start()
        return request_id

    def drop(self, request_id: int) -> None:
        """Forget a request that has ended."""
        with self._lock:
            self._matchers.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            for wish in self._core.poll_masks(_POLL_SECONDS):
                with self._lock:
                    matcher = self._matchers.get(wish.request_id)
                if matcher is None:
                    continue
                try:
                    matcher.advance(wish.tokens)
                    masks = matcher.masks_along(wish.drafts)
                    self._core.give_masks(wish.request_id, wish.num_output, len(wish.drafts), masks)
                except Exception as e:  # one grammar must not stop the others
                    self._core.refuse_mask(wish.request_id, wish.num_output, f"the grammar failed: {e}")
