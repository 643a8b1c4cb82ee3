"""The tiny engine of tests/engines in the real core, and a few shorthands."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from castiron.engines import open_engine
from castiron.runtime import _core
from castiron.runtime.loading import open_session
from castiron.runtime.options import RuntimeOptions

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "engines" / "tiny.py")
assert _spec is not None
assert _spec.loader is not None
tiny = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("tiny", tiny)
_spec.loader.exec_module(tiny)


@dataclass
class Outcome:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    context_logits: np.ndarray[Any, Any] | None = None
    generation_logits: np.ndarray[Any, Any] | None = None
    finish_reason: str = ""
    stop_token_id: int | None = None
    error: str = ""
    finished: bool = False


def arguments(folder: Path) -> dict[str, Any]:
    """Keyword arguments of ``_core.Engine`` for an engine folder."""
    engine = open_engine(folder)
    return {
        "program": engine.program("host").model_dump(),
        "weights_path": str(engine.weights_path),
        "tensors": dict(engine.tensors),
        "options": {"num_threads": 1},
    }


def open_tiny(folder: Path) -> Any:
    """A session over the engine, of one thread."""
    return open_session(folder, options=RuntimeOptions(num_threads=1))


def params(**fields: Any) -> Any:
    """Greedy unless told otherwise."""
    made = _core.SamplingParams()
    made.temperature = 0.0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def prompt(tokens: Iterable[int]) -> np.ndarray[Any, Any]:
    return np.array(list(tokens), np.int32)


@contextmanager
def held(core: Any) -> Iterator[int]:
    """The engine stands still within it: a request, whose id it gives, has logits to wait for."""
    request = core.submit(prompt([1]), params(max_tokens=1, process_logits=True))
    row = core.poll_logits(request)
    try:
        yield request
    finally:
        core.give_logits(request, row.num_output, row.logits)


def finish(core: Any, ids: Iterable[int], seconds: float = 60.0) -> dict[int, Outcome]:
    """Poll until all of ``ids`` have ended."""
    outcomes = {request_id: Outcome() for request_id in ids}
    deadline = time.monotonic() + seconds
    while not all(outcome.finished for outcome in outcomes.values()):
        assert time.monotonic() < deadline, "the engine hangs"
        for event in core.poll(0.5):
            outcome = outcomes[event.request_id]
            assert not outcome.finished
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.prompt_logprobs += event.prompt_logprobs
            if event.context_logits is not None:
                outcome.context_logits = event.context_logits
            if event.generation_logits is not None:
                outcome.generation_logits = event.generation_logits
            outcome.finish_reason, outcome.stop_token_id = event.finish_reason, event.stop_token_id
            outcome.error, outcome.finished = event.error, event.finished
    return outcomes


def generate(core: Any, tokens: Iterable[int], **fields: Any) -> Outcome:
    request_id = core.submit(prompt(tokens), params(**fields))
    return finish(core, [request_id])[request_id]
