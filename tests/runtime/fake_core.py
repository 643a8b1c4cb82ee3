"""A Python twin of ``_core.Engine``: the next token is a known function of the tokens before it."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from castiron.runtime.core_api import CoreTypes, EngineInfo
from castiron.runtime.session import Session

VOCAB = 300
#: So many tokens that a request for them ends only by being cancelled; give twice that as `max_seq_len`.
FOR_EVER = 1_000_000


@dataclass
class FakeParams:
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    no_repeat_ngram_size: int = 0
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    prompt_logprobs: int = -1
    process_logits: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    num_speculative_tokens: int = -1


@dataclass
class FakeLogprobs:
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class FakeEvent:
    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[FakeLogprobs] = field(default_factory=list)
    finished: bool = False
    finish_reason: str = ""
    stop_token_id: int | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    prompt_logprobs: list[FakeLogprobs] = field(default_factory=list)
    beams: list[Any] = field(default_factory=list)
    context_logits: Any = None
    generation_logits: Any = None


class FakeQueueFullError(RuntimeError):
    pass


class FakeDeadError(RuntimeError):
    pass


def logits(history: list[int], vocab: int = VOCAB) -> np.ndarray:
    """float32 [vocab]: pseudo-random, decided by the last three tokens and the length."""
    seed = sum((i + 1) * 7919 * t for i, t in enumerate(history[-3:])) + 104729 * len(history)
    return np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 3


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x.astype(np.float64) - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def scored(row: np.ndarray, token: int, top: int) -> FakeLogprobs:
    raw = log_softmax(row)
    best = np.argsort(-raw, kind="stable")[:top]
    return FakeLogprobs(float(raw[token]), [(int(t), float(raw[t])) for t in best])


@dataclass
class _Running:
    id: int
    history: list[int]
    prompt: int
    params: FakeParams
    generated: int = 0
    cancelled: bool = False
    first_token_seconds: float = 0.0
    arrived: float = field(default_factory=time.perf_counter)


class FakeCore:
    """Steps happen inside ``poll``, which makes tests deterministic.

    Args:
        script: tokens that every request emits instead of the function's, one after the other.
        step_seconds: how long a step takes.
        max_batch_size: requests that run at once; the rest wait in line.
    """

    def __init__(
        self,
        vocab: int = VOCAB,
        script: list[int] | None = None,
        step_seconds: float = 0.0,
        max_batch_size: int = 64,
    ) -> None:
        self.vocab = vocab
        self.script = script
        self.step_seconds = step_seconds
        self.max_batch_size = max_batch_size
        self.max_queue_size = 1 << 20
        self.fail_with: Exception | None = None
        self.cancelled: list[int] = []
        self.submitted: list[tuple[list[int], FakeParams]] = []
        self.adapters: list[dict[str, Any]] = []
        self.removed: list[int] = []
        self.adapter_of: list[int] = []
        self.closed = False
        self._next_id = 1
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._waiting: deque[_Running] = deque()
        self._arrived = threading.Event()
        self._free = threading.Event()
        self._free.set()

    def add_adapter(self, modules: dict[str, Any]) -> int:
        self.adapters.append(modules)
        return len(self.adapters)

    def remove_adapter(self, adapter: int) -> None:
        self.removed.append(adapter)

    def submit(
        self,
        prompt: array[int],
        params: FakeParams,
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: int = 0,
    ) -> int:
        view = memoryview(prompt)
        assert (view.format, view.ndim, view.c_contiguous) == ("i", 1, True)
        if self.closed:
            raise FakeDeadError("the engine thread has ended")
        if prompt[0] == 299:
            raise ValueError("token 299 is refused by the fake core")
        with self._lock:
            if len(self._waiting) >= self.max_queue_size:
                raise FakeQueueFullError("queue full")
            request = _Running(self._next_id, prompt.tolist(), len(prompt), params)
            self._next_id += 1
            self._waiting.append(request)
            self.submitted.append((prompt.tolist(), params))
            self.adapter_of.append(adapter)
            self._arrived.set()
            return request.id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            for request in [*self._running.values(), *self._waiting]:
                if request.id == request_id:
                    request.cancelled = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step is made within it: what runs still runs, however long a busy machine takes to look."""
        with self._lock:
            self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def poll(self, timeout: float) -> list[FakeEvent]:
        if self.fail_with is not None:
            raise self.fail_with
        if not (self._arrived.wait(timeout) and self._free.wait(timeout)):
            return []
        if self.step_seconds:
            time.sleep(self.step_seconds)
        with self._lock:
            if not self._free.is_set():
                return []
            while self._waiting and len(self._running) < self.max_batch_size:
                request = self._waiting.popleft()
                self._running[request.id] = request
            events = [self._step(r) for r in list(self._running.values())]
            for event in events:
                r = self._running[event.request_id]
                if r.generated and not r.first_token_seconds:
                    r.first_token_seconds = time.perf_counter() - r.arrived
                if event.finished:
                    event.first_token_seconds = event.first_token_seconds or r.first_token_seconds
                    event.seconds = event.seconds or time.perf_counter() - r.arrived
                    del self._running[event.request_id]
            if not self._running and not self._waiting:
                self._arrived.clear()
            return events

    def stats(self, recent_steps: int = 0) -> dict[str, Any]:
        with self._lock:
            running, waiting = len(self._running), len(self._waiting)
        return {
            "running": running,
            "waiting": waiting,
            "kv_blocks_total": 100,
            "kv_blocks_used": running,
            "kv_blocks_free": 100 - running,
            "steps": 7,
        }

    def shutdown(self) -> None:
        self.closed = True

    def _step(self, r: _Running) -> FakeEvent:
        event = FakeEvent(r.id, prompt_tokens=r.prompt)
        if r.cancelled:
            event.finished, event.finish_reason = True, "cancelled"
            self._add_generation_logits(event, r)
            return event
        if r.generated == 0 and r.params.context_logits:
            rows = [logits(r.history[: i + 1], self.vocab) for i in range(r.prompt)]
            event.context_logits = np.stack(rows)
        if r.generated == 0 and r.params.prompt_logprobs >= 0:
            event.prompt_logprobs = [
                scored(logits(r.history[:i], self.vocab), r.history[i], r.params.prompt_logprobs)
                for i in range(1, r.prompt)
            ]
        if r.params.max_tokens == 0:
            event.finished, event.finish_reason = True, "length"
            return event
        scores = logits(r.history, self.vocab)
        token = self._choose(scores, r)
        if token in r.params.stop_token_ids:
            event.finished, event.finish_reason, event.stop_token_id = True, "stop", token
            return event
        r.generated += 1
        r.history.append(token)
        event.token_ids = [token]
        if r.params.logprobs >= 0:
            event.logprobs = [scored(scores, token, r.params.logprobs)]
        if r.generated >= r.params.max_tokens:
            event.finished, event.finish_reason = True, "length"
        if event.finished:
            self._add_generation_logits(event, r)
        return event

    def _add_generation_logits(self, event: FakeEvent, r: _Running) -> None:
        places = range(r.prompt, len(r.history))
        if r.params.generation_logits and places:
            event.generation_logits = np.stack([logits(r.history[:i], self.vocab) for i in places])

    def _choose(self, scores: np.ndarray, r: _Running) -> int:
        if self.script is not None:
            return self.script[r.generated % len(self.script)]
        if r.generated < r.params.min_tokens:
            scores = scores.copy()
            scores[r.params.stop_token_ids] = -np.inf
        if r.params.temperature == 0:
            return int(scores.argmax())
        p = np.exp(log_softmax(scores / r.params.temperature))
        seed = r.params.seed if r.params.seed is not None else r.id
        return int(np.random.default_rng([seed, r.generated]).choice(self.vocab, p=p / p.sum()))


def greedy(prompt: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    """The tokens that the fake engine gives, computed apart from it."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(logits(history, vocab).argmax()))
    return history[len(prompt) :]


def make_session(core: FakeCore | None = None, *, max_queue_size: int | None = None, **info: Any) -> Session:
    core = core or FakeCore()
    fields = {
        "name": "fake",
        "vocab_size": core.vocab,
        "max_seq_len": 256,
        "max_batch_size": core.max_batch_size,
        "max_num_tokens": 256,
        **info,
    }
    types = CoreTypes(FakeParams, FakeQueueFullError, FakeDeadError)
    return Session(core, EngineInfo(**fields), types, max_queue_size=max_queue_size)
