"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..outputs import Update, joined
from ..param_values import as_integer
from ..request_errors import ParameterError
from ..sampling_params import MAX_LOGPROBS
from .body import parse
from .errors import ApiError
from .generation import Generation
from .protocol import ChatBody
from .service import Service, rank, refuse_unserved
from .streaming import EventStream, event, while_connected
from .text_logprobs import chat_logprobs, prompt_logprobs

#: What the template gets from the request's own fields, which chat_template_kwargs must not contradict.
_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one request."""
    body = await parse(request, ChatBody, service.config.max_body_bytes)
    lora = service.admit(body.model)
    _check(body)
    service.admit_outputs(1, body)
    prompt = await service.off_loop(lambda: _encode(service, body))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise ParameterError("max_completion_tokens is 0; expected at least 1", "max_completion_tokens")
    params = service.params(
        body,
        lora=lora,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    async with service.engine.prepared(params):
        generation = Generation(service, [prompt], params)
    answer = _Answer(service, body, generation, params.n)
    if body.stream:
        return EventStream(answer.events(), generation.close)
    try:
        return JSONResponse(await while_connected(request.receive, answer.whole()))
    finally:
        generation.close()


def _check(body: ChatBody) -> None:
    refuse_unserved(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.top_logprobs is not None:
        as_integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.tools is not None and not body.tools:
        raise ApiError(400, "tools is an empty list; leave it out instead", "tools")
    if body.tool_choice not in (None, "none") and not body.tools:
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if body.tools and body.tool_choice != "none":
        raise ApiError(501, "tool calls are not supported by this server; set tool_choice to none", "tools")
    for name in body.chat_template_kwargs or {}:
        if name in _OWN_FIELDS:
            raise ApiError(
                400,
                f"chat_template_kwargs holds {name!r}, which is a field of the request itself",
                "chat_template_kwargs",
            )


def _encode(service: Service, body: ChatBody) -> list[int]:
    """Token ids of the conversation; on a worker thread."""
    tokenizer = service.engine.session.need_tokenizer()
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        options["documents"] = body.documents
    goes_on = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    return tokenizer.encode_chat(
        body.messages,
        **{
            **options,
            "tools": body.tools,
            "add_generation_prompt": not goes_on if begins is None else begins,
            "continue_final_message": goes_on,
        },
    )


class _Answer:
    """Builds the bodies of one answer."""

    def __init__(self, service: Service, body: ChatBody, generation: Generation, n: int) -> None:
        self._body = body
        self._generation = generation
        self._n = n
        self._tokenizer = service.engine.session.tokenizer
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": generation.lora or service.model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer without a stream."""
        found = await self._generation.all()
        choices = []
        answer: dict[str, Any] = dict(self._head)
        for choice, updates in zip(self._generation.choices, found, strict=True):
            update = joined(updates)
            if self._body.prompt_logprobs is not None and update.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, update.prompt_logprobs, self._body.prompt_logprobs
                )
            message = {"role": "assistant", "content": update.text, "refusal": None}
            choices.append(self._with(choice.index, update, {"message": message}))
        return {**answer, "choices": choices, "usage": self._generation.usage(self._n)}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream: the role, pieces of content, the reason of the end, usage if wanted."""
        options = self._body.stream_options
        every = options is not None and bool(options.continuous_usage_stats)

        def chunk(choice: dict[str, Any]) -> bytes:
            usage = {"usage": self._generation.usage(self._n)} if every else {}
            return event({**self._head, "choices": [choice], **usage})

        opening = {"role": "assistant", "content": ""}
        yield b"".join(
            chunk({"index": c.index, "delta": opening, "logprobs": None, "finish_reason": None})
            for c in self._generation.choices
        )
        async for batch in self._generation.batches():
            parts = []
            for choice, update in batch:
                if update.text or update.finish_reason or self._wants_tokens(update):
                    delta = {"content": update.text} if update.text else {}
                    parts.append(chunk(self._with(choice.index, update, {"delta": delta})))
            if parts:
                yield b"".join(parts)
        if options is not None and options.include_usage:
            yield event({**self._head, "choices": [], "usage": self._generation.usage(self._n)})

    def _wants_tokens(self, update: Update) -> bool:
        return bool(update.token_ids) and bool(self._body.logprobs or self._body.return_token_ids)

    def _with(self, index: int, update: Update, content: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            **rank(update),
        }
        if self._body.logprobs:
            made["logprobs"] = chat_logprobs(self._tokenizer, update.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            made["token_ids"] = list(update.token_ids)
        return made
