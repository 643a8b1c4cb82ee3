"""A stand-in for ``_core.Engine`` that runs TinyModel in numpy, with defects on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny import TOKENS, TinyModel

Floats = np.ndarray[Any, Any]


class NumpyCore:
    """Answers in ``poll``; greedy only.

    defect: applied to the logits [rows, vocab] of every pass; its second argument tells a decode step from
    prefill.
    """

    def __init__(self, model: TinyModel, defect: Callable[[Floats, bool], Floats] | None = None) -> None:
        self.model = model
        self.defect = defect or (lambda logits, _: logits)
        self.waiting: list[tuple[int, list[int], Any]] = []
        self.closed = False

    def submit(self, prompt: Floats, params: Any) -> int:
        assert prompt.dtype == np.int32
        assert prompt.flags.c_contiguous
        if len(prompt) > 96:
            raise ValueError("maximum context length is 96 tokens")
        self.waiting.append((len(self.waiting) + 1, prompt.tolist(), params))
        return len(self.waiting)

    def cancel(self, request_id: int) -> None:
        raise AssertionError("verify cancels nothing")

    def poll(self, timeout: float) -> list[Any]:
        events = []
        for request, tokens, params in self.waiting:
            event = {"request_id": request, "token_ids": [], "logprobs": [], "finished": True, "error": ""}
            event |= {
                "finish_reason": "length",
                "stop_token_id": None,
                "cached_tokens": 0,
                "context_logits": None,
            }
            if params.context_logits:
                event["context_logits"] = self.logits(tokens, range(len(tokens)), False)
            for _ in range(params.max_tokens):
                row = self.logits(tokens, [len(tokens) - 1], bool(event["token_ids"]))[0]
                token = int(row[: TOKENS.vocab_size_used].argmax())
                raw = row - np.log(np.exp(row.astype(np.float64)).sum())
                best = np.argsort(-raw)[: params.logprobs]
                event["token_ids"].append(token)
                event["logprobs"].append(
                    SimpleNamespace(logprob=float(raw[token]), top=[(int(t), float(raw[t])) for t in best])
                )
                tokens.append(token)
            events.append(SimpleNamespace(**event, prompt_tokens=len(tokens)))
        self.waiting = []
        return events

    def stats(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        self.closed = True

    def logits(self, tokens: Sequence[int], rows: Sequence[int], decode: bool) -> Floats:
        return self.defect(self.model.logits(tokens, rows), decode)


class NumpyRunner:
    """What ``verify`` needs."""

    choice = None

    def __init__(self, model: TinyModel, defect: Callable[[Floats, bool], Floats] | None = None) -> None:
        self.core: Any = NumpyCore(model, defect)

    @staticmethod
    def make_params() -> Any:
        return SimpleNamespace(max_tokens=16, temperature=1.0, logprobs=-1, context_logits=False)
