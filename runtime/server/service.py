"""What the endpoints share: engine, names, defaults, threads for work that must not block the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..async_engine import AsyncEngine
from ..outputs import Update
from ..request_errors import ParameterError
from ..sampling_params import SamplingParams
from ..session import Session
from .errors import ApiError
from .metrics import Metrics
from .parsers import AnswerStyle, find_style
from .protocol import ChatBody, CompletionBody
from .request_context import current
from .served_engine import EngineSlot, ServedEngine, served
from .structured import structured_output

_T = TypeVar("_T")
#: Up to this size a body is read faster than a thread is woken up for it, or nearly so.
SMALL_BODY_BYTES = 32 << 10
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_PASSED_ON = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
    "min_p",
    "typical_p",
    "seed",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "no_repeat_ngram_size",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "num_speculative_tokens",
)


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        model_names: names that requests may use; the first is the one in answers.
        use_generation_config: take sampling defaults from the checkpoint's generation_config.json.
        worker_threads: threads for tokenization and chat templates.
        max_body_bytes: larger request bodies are refused with 413.
        lora_updating: clients may load and unload LoRA adapters.
        tool_call_parser, reasoning_parser: names of ``parsers``, ``none``, or ``auto``: by the chat template.
        tokenizer_info: answer GET /tokenizer_info, which shows the chat template.
        page: answer with the page at /.
        log_prompts: write the text of prompts into the log.
        stall_seconds: /health says 503 when requests are running and nothing has happened for this long.
    """

    model_names: tuple[str, ...]
    use_generation_config: bool = True
    worker_threads: int = 2
    max_body_bytes: int = 16 << 20
    lora_updating: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    tokenizer_info: bool = False
    page: bool = True
    log_prompts: bool = False
    stall_seconds: float = 120.0


class Service:
    """An engine behind the endpoints.

    Args:
        engine: the first one.
        load_engine: opens another from a folder, for POST /v1/engine/swap; None = that is refused.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        load_engine: Callable[[str], Session] | None = None,
    ) -> None:
        self.config = config
        self.slot = EngineSlot(self.as_served(engine.session, engine))
        self.load_engine = load_engine
        self.metrics = Metrics(lambda: self.slot.current.engine.session, config.model_names[0])
        self.created = int(time.time())
        self.draining = False
        #: Folder of the engine that the last exchange brought.
        self.exchanged_for: str | None = None
        self._pool = ThreadPoolExecutor(config.worker_threads, thread_name_prefix="castiron-text")

    def as_served(self, session: Session, engine: AsyncEngine | None = None) -> ServedEngine:
        """An engine as this server serves it; raises EngineError where its defaults or names do not fit."""
        return served(
            engine or AsyncEngine(session),
            _style(session, self.config),
            self.config.model_names,
            self.config.use_generation_config,
        )

    @property
    def engine(self) -> AsyncEngine:
        """The engine of the request that the current task answers, from its first use to its end the same;
        apart from requests, the one that new requests get.
        """
        return self._served.engine

    @property
    def style(self) -> AnswerStyle:
        """How its model writes calls and reasoning."""
        return self._served.style

    def hold_engine(self) -> Callable[[], None]:
        """Keep the request's engine beyond the HTTP request, until what this returns is called."""
        held = self._served
        held.users += 1
        return partial(self.slot.leave, held)

    @property
    def unfinished(self) -> int:
        """Requests that run or wait in all engines."""
        return self.slot.unfinished

    @property
    def _served(self) -> ServedEngine:
        context = current.get()
        if context is None:
            return self.slot.current
        if context.served is None:
            context.served = self.slot.enter()
            context.at_end.append(partial(self.slot.leave, context.served))
        return context.served

    @property
    def model(self) -> str:
        """The name in answers."""
        return self.config.model_names[0]

    async def off_loop(self, work: Callable[[], _T]) -> _T:
        """Run CPU work on a thread, so that other requests and health checks go on."""
        _ = self._served  # chosen here: only the loop's thread counts who uses it
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._pool, run, work)

    async def by_size(self, work: Callable[[], _T]) -> _T:
        """Run CPU work that grows with the request's body: on a thread where that is large."""
        context = current.get()
        if context is None or context.body_bytes <= SMALL_BODY_BYTES:
            return work()
        return await self.off_loop(work)

    def in_background(self, work: Callable[[], None]) -> None:
        """The same for what nobody waits for."""
        self._pool.submit(work)

    async def stats(self, recent_steps: int = 0) -> dict[str, Any]:
        """Counters and gauges of the engine; see ``Core.stats``."""
        return await self.off_loop(lambda: self.engine.session.core.stats(recent_steps))

    def admit(self, model: str | None) -> str | None:
        """The LoRA adapter that the name of a model means, if any; refuse while draining, and names that are
        not served.
        """
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; send the request to another replica",
                # A client that keeps the connection would ask the same server again.
                headers={"Connection": "close", "Retry-After": "1"},
            )
        if model is None or model in self.config.model_names:
            return None
        adapters = self.adapter_paths()
        if model in adapters:
            return model
        served = [*self.config.model_names, *sorted(adapters)[:20]]
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; this server has {', '.join(served)}",
            "model",
            "model_not_found",
        )

    def adapter_paths(self) -> Mapping[str, str]:
        """The folders of the LoRA adapters by their names."""
        adapters = self.engine.session.adapters
        return {} if adapters is None else adapters.paths

    def admit_outputs(self, prompts: int, body: CompletionBody | ChatBody) -> None:
        """Refuse more outputs than the queue can ever hold: 429 would make clients try for ever."""
        n = 1 if body.use_beam_search else max(body.n or 1, body.best_of or 1)
        capacity = self.engine.session.capacity
        if capacity is not None and prompts * n > capacity:
            raise ParameterError(
                f"the request asks for {prompts * n} outputs ({prompts} prompts, {n} of each), and this "
                f"server accepts at most {capacity} at once; send it in parts, or start the server with a "
                "larger --max-queue-size",
                ("best_of" if body.best_of else "n") if n > capacity else "prompt",
            )

    def params(self, body: CompletionBody | ChatBody, **changes: Any) -> SamplingParams:
        """Sampling parameters: the request's, else the model's, else the API's."""
        given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
        defaults = self._served.defaults
        if body.use_beam_search:  # nothing is drawn, whatever the model's defaults for that are
            defaults = {name: value for name, value in defaults.items() if name not in _DRAWING}
        has_tokenizer = self.engine.session.info.tokenizer_dir is not None
        return SamplingParams(
            **{
                **defaults,
                **given,
                "structured_output": structured_output(body),
                "detokenize": has_tokenizer,
                **changes,
            }
        )

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body: can the engine make progress?"""
        session = self.engine.session
        age = session.seconds_since_progress
        body: dict[str, Any] = {
            "status": "ok",
            "unfinished_requests": session.unfinished,
            "seconds_since_progress": round(age, 3),
        }
        if session.failure is not None:
            return 503, {**body, "status": "failed", "reason": session.failure}
        if age > self.config.stall_seconds:
            return 503, {**body, "status": "stalled"}
        return 200, body

    async def close(self) -> None:
        """Stop the engines and the threads."""
        await self.slot.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _style(session: Session, config: ServerConfig) -> AnswerStyle:
    """How the model writes calls and reasoning."""
    tokenizer = session.tokenizer
    templates = {} if tokenizer is None else tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default"))
    return find_style(
        "" if template is None else template.source,
        {} if tokenizer is None else tokenizer.special_ids_by_text,
        config.tool_call_parser,
        config.reasoning_parser,
    )


def refuse_unserved(body: CompletionBody | ChatBody) -> None:
    """Refuse what would change the answer and is not served, instead of ignoring it."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only for stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed; set stream=false", "prompt_logprobs")
    if body.stream and body.use_beam_search:
        raise ApiError(400, "a beam search's texts are known at its end; set stream=false", "use_beam_search")
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise ApiError(400, "the best of several outputs are known when all end; set stream=false", "best_of")


def rank(update: Update) -> dict[str, float]:
    """Fields of a choice that was chosen among several."""
    found = {"cumulative_logprob": update.cumulative_logprob, "score": update.score}
    return {name: value for name, value in found.items() if value is not None}
