"""Asking a running engine for numbers: logits of a prompt, greedy tokens and their log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from castiron.errors import EngineError

from .core_api import Core, CoreEvent

Floats = npt.NDArray[np.float32]
_POLL_SECONDS = 1.0
_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Probe:
    """One request at a time to ``core``; ``make_params`` makes an empty ``_core.SamplingParams``."""

    core: Core
    make_params: Callable[[], Any]

    def context_logits(self, tokens: npt.NDArray[np.int32]) -> Floats:
        """Return the engine's logits [len(tokens), V] of one prompt."""
        params = self.make_params()
        params.max_tokens = 0
        params.context_logits = True
        events = self.collect(tokens, params)
        parts = [np.asarray(e.context_logits, np.float32) for e in events if e.context_logits is not None]
        logits = np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
        if len(logits) != len(tokens):
            raise EngineError(f"the runtime returned logits for {len(logits)} of {len(tokens)} tokens.")
        return logits

    def generate(self, tokens: npt.NDArray[np.int32], count: int) -> tuple[list[int], list[dict[int, float]]]:
        """Return ``count`` greedy tokens and, for each, {token: log-probability} of the sampled and the top
        ones.
        """
        params = self.make_params()
        params.max_tokens = count
        params.temperature = 0.0
        params.logprobs = 5
        generated: list[int] = []
        logprobs: list[dict[int, float]] = []
        for event in self.collect(tokens, params):
            for token, entry in zip(event.token_ids, event.logprobs, strict=True):
                generated.append(int(token))
                logprobs.append(
                    {**{int(t): float(p) for t, p in entry.top}, int(token): float(entry.logprob)}
                )
        if len(generated) != count:
            raise EngineError(f"the runtime generated {len(generated)} of {count} tokens.")
        return generated, logprobs

    def collect(self, tokens: npt.NDArray[np.int32], params: Any) -> list[CoreEvent]:
        """All events of one request. Raises EngineError where it is refused, fails or gets no answer."""
        try:
            request = self.core.submit(np.ascontiguousarray(tokens, np.int32), params)
        except ValueError as error:
            raise EngineError(f"the runtime refused a prompt of {len(tokens)} tokens: {error}") from None
        events: list[CoreEvent] = []
        deadline = time.monotonic() + _TIMEOUT
        while not (events and events[-1].finished):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"a prompt of {len(tokens)} tokens got no answer in {_TIMEOUT:.0f} seconds."
                )
            events += [event for event in self.core.poll(_POLL_SECONDS) if event.request_id == request]
        if events[-1].finish_reason == "error":
            raise EngineError(f"the runtime failed on a prompt: {events[-1].error}")
        return events
