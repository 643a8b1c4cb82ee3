"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..outputs import TokenLogprob, Update, joined
from ..request_errors import ParameterError
from .body import parse
from .errors import ApiError
from .generation import Choice, Generation
from .protocol import CompletionBody
from .service import Service, rank, refuse_unserved
from .streaming import MARK, EventStream, WriteNow, event, text_event, while_connected
from .text_logprobs import completion_logprobs, prompt_logprobs

_DEFAULT_MAX_TOKENS = 16


async def completions(service: Service, request: Request) -> Response:
    """Answer one request."""
    body = await parse(service, request, CompletionBody)
    lora = service.admit(body.model)
    _check(body)
    # Before anything is done for each prompt: 16 MiB hold millions of them.
    service.admit_outputs(_prompt_count(body), body)
    prompts, texts = await service.off_loop(lambda: _prompts(service, body))
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ParameterError("max_tokens is 0; expected at least 1 (0 is for echo=true)", "max_tokens")
    params = service.params(
        body,
        lora=lora,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_scored(body),
    )
    async with service.engine.prepared(params):
        generation = Generation(service, prompts, params)
    answer = _Answer(service, body, generation, texts, params.n)
    if body.stream:
        return EventStream(answer.events(), generation.close, begun=answer.shorten)
    try:
        return JSONResponse(await while_connected(request.receive, answer.whole()))
    finally:
        generation.close()


def _check(body: CompletionBody) -> None:
    refuse_unserved(body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported: the model completes at the end of the prompt", "suffix")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise ApiError(
            400, "echo gives the whole prompt; it cannot be truncated as well", "truncate_prompt_tokens"
        )
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs cannot be streamed; set stream=false", "echo")


def _scored(body: CompletionBody) -> int | None:
    """Alternatives wanted for each token of the prompt; None = no scores."""
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


def _prompt_count(body: CompletionBody) -> int:
    one = isinstance(body.prompt, str) or isinstance(next(iter(body.prompt), None), int)
    return 1 if one else len(body.prompt)


def _prompts(service: Service, body: CompletionBody) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and its text for echo; on a worker thread."""
    session = service.engine.session
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given:
        raise ParameterError(
            "prompt is an empty list; expected text, token ids, or a list of those", "prompt"
        )
    if isinstance(given[0], int):
        given = [given]
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for prompt in given:
        if isinstance(prompt, str):
            tokenizer = session.need_tokenizer()
            ids = tokenizer.encode(prompt, body.add_special_tokens is not False)
            if not ids:
                raise ParameterError("a prompt is empty; expected at least one token", "prompt")
            prompts.append(ids)
            texts.append(prompt)
        else:
            prompts.append(session.token_ids(prompt))
            known = session.tokenizer if body.echo else None
            texts.append(known.decode(prompt, False) if known is not None else None)
    return prompts, texts


class _Answer:
    """Builds the bodies of one answer."""

    def __init__(
        self, service: Service, body: CompletionBody, generation: Generation, texts: list[str | None], n: int
    ) -> None:
        self._body = body
        self._generation = generation
        self._texts = texts
        self._n = n
        self._tokenizer = None if body.return_tokens_as_token_ids else service.engine.session.tokenizer
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.lora or service.model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer without a stream."""
        found = [joined(updates) for updates in await self._generation.all()]
        choices = []
        for choice in self._generation.choices:
            # A prompt is scored with its first output.
            scores = found[choice.index - choice.index % self._n].prompt_logprobs or ()
            entries = scores if self._body.echo and self._body.logprobs is not None else ()
            made = self._choice(choice, found[choice.index], 0, self._echo(choice), entries)
            if self._body.prompt_logprobs is not None:
                made["prompt_logprobs"] = prompt_logprobs(self._tokenizer, scores, self._body.prompt_logprobs)
            choices.append(made)
        return {**self._head, "choices": choices, "usage": self._generation.usage(self._n)}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        options = self._body.stream_options
        every = options is not None and bool(options.continuous_usage_stats)
        offsets = [0] * len(self._generation.choices)
        begun = [False] * len(offsets)
        async for batch in self._generation.batches():
            parts = []
            for choice, update in batch:
                echo = "" if begun[choice.index] else self._echo(choice)
                begun[choice.index] = True
                if not (echo or update.text or update.finish_reason or self._wants_tokens(update)):
                    continue
                made = self._choice(choice, update, offsets[choice.index], echo, [])
                offsets[choice.index] += len(made["text"])
                chunk = {**self._head, "choices": [made]}
                if every:
                    chunk["usage"] = self._generation.usage(self._n)
                parts.append(event(chunk))
            if parts:
                yield b"".join(parts)
        if options is not None and options.include_usage:
            yield event({**self._head, "choices": [], "usage": self._generation.usage(self._n)})

    def shorten(self, write_now: WriteNow) -> None:
        """Send chunks that differ in their text alone at once, where the request has no others."""
        body, options = self._body, self._body.stream_options
        if body.logprobs is not None or body.return_token_ids or (options and options.continuous_usage_stats):
            return
        makers = [
            text_event({**self._head, "choices": [self._choice(choice, Update(text=MARK), 0, "", [])]}, MARK)
            for choice in self._generation.choices
        ]
        self._generation.shorten(write_now, makers)

    def _wants_tokens(self, update: Update) -> bool:
        return bool(update.token_ids) and (
            self._body.logprobs is not None or bool(self._body.return_token_ids)
        )

    def _echo(self, choice: Choice) -> str:
        return (self._texts[choice.index // self._n] or "") if self._body.echo else ""

    def _choice(
        self,
        choice: Choice,
        update: Update,
        offset: int,
        echo: str,
        prompt_entries: Sequence[TokenLogprob | None],
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": choice.index,
            "text": echo + update.text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            **rank(update),
        }
        if self._body.logprobs is not None:
            entries = [*prompt_entries, *update.logprobs]
            start = offset if prompt_entries else offset + len(echo)
            made["logprobs"] = completion_logprobs(
                self._tokenizer, entries, choice.prompt_ids, start, self._body.logprobs
            )
        if self._body.return_token_ids:
            made["token_ids"] = list(update.token_ids)
            made["prompt_token_ids"] = choice.prompt_ids
        return made
