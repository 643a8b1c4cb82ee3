"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..outputs import Update
from .body import parse
from .chat_turn import ChatTurn, Piece
from .generation import Choice
from .parsers import CallArguments, CallStart, Content, Delta, Message, Reasoning
from .protocol import ChatBody
from .service import Service, rank
from .streaming import MARK, EventStream, WriteNow, event, text_event, while_connected
from .text_logprobs import chat_logprobs, prompt_logprobs


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one request."""
    body = await parse(service, request, ChatBody)
    turn = await ChatTurn.begin(service, body)
    answer = _Answer(service, body, turn)
    if body.stream:
        return EventStream(answer.events(), turn.close, begun=answer.shorten)
    try:
        return JSONResponse(await while_connected(request.receive, answer.whole()))
    finally:
        turn.close()


class _Answer:
    """Builds the bodies of one answer."""

    def __init__(self, service: Service, body: ChatBody, turn: ChatTurn) -> None:
        self._body = body
        self._turn = turn
        self._tokenizer = None if body.return_tokens_as_token_ids else service.engine.session.tokenizer
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": turn.model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer without a stream."""
        choices = []
        answer: dict[str, Any] = dict(self._head)
        for piece in await self._turn.whole():
            update = piece.update
            if self._body.prompt_logprobs is not None and update.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, update.prompt_logprobs, self._body.prompt_logprobs
                )
            choices.append(self._with(piece, update, {"message": self._message(piece)}))
        return {**answer, "choices": choices, "usage": self._turn.usage()}

    def _message(self, piece: Piece) -> dict[str, Any]:
        said = Message()
        said.add(piece.deltas)
        made: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            made["reasoning"] = made["reasoning_content"] = said.reasoning
        if said.calls:
            made["content"] = said.content or None
            made["tool_calls"] = [
                {
                    "id": call.id or self._turn.make_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls.values()
            ]
        return made

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream: the role, pieces of content, the reason of the end, usage if wanted."""
        options = self._body.stream_options
        every = options is not None and bool(options.continuous_usage_stats)

        def chunk(choice: dict[str, Any]) -> bytes:
            usage = {"usage": self._turn.usage()} if every else {}
            return event({**self._head, "choices": [choice], **usage})

        opening = {"role": "assistant", "content": ""}
        yield b"".join(
            chunk({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
            for index in range(self._turn.count)
        )
        async for batch in self._turn.pieces():
            parts = []
            for piece in batch:
                deltas = delta_objects(piece.deltas, self._turn.make_id)
                update = piece.update
                if not deltas and (update.finish_reason or self._wants_tokens(update)):
                    deltas = [{}]
                # What belongs to the tokens and to the end comes with the last of them.
                parts += [chunk(self._with(piece, Update(), {"delta": delta})) for delta in deltas[:-1]]
                parts += [chunk(self._with(piece, update, {"delta": delta})) for delta in deltas[-1:]]
            if parts:
                yield b"".join(parts)
        if options is not None and options.include_usage:
            yield event({**self._head, "choices": [], "usage": self._turn.usage()})

    def shorten(self, write_now: WriteNow) -> None:
        """Send chunks that differ in their text alone at once, where the request has no others."""
        body, options = self._body, self._body.stream_options
        if body.logprobs or body.return_token_ids or (options and options.continuous_usage_stats):
            return

        def maker(choice: Choice) -> Callable[[str], bytes]:
            piece = Piece(choice, Update(), [], None)
            made = self._with(piece, piece.update, {"delta": {"content": MARK}})
            return text_event({**self._head, "choices": [made]}, MARK)

        self._turn.shorten(write_now, [maker(choice) for choice in self._turn.choices])

    def _wants_tokens(self, update: Update) -> bool:
        return bool(update.token_ids) and bool(self._body.logprobs or self._body.return_token_ids)

    def _with(self, piece: Piece, update: Update, content: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": piece.choice.index,
            **content,
            "logprobs": None,
            "finish_reason": piece.finish_reason if update.finish_reason else None,
            "stop_reason": update.stop_reason,
            **rank(update),
        }
        if self._body.logprobs:
            made["logprobs"] = chat_logprobs(self._tokenizer, update.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            made["token_ids"] = list(update.token_ids)
        return made


def delta_objects(deltas: Sequence[Delta], make_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Deltas as the ``delta`` objects of chunks.

    The first one of a call has its name and id, later ones pieces of the arguments alone: each in a chunk of
    its own, for clients that read one entry of ``tool_calls`` per chunk and index.
    """
    made: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, (CallStart, CallArguments)):
            entry: dict[str, Any] = {"index": delta.index}
            if isinstance(delta, CallStart):
                entry |= {"id": delta.id or make_id(), "type": "function"}
                entry["function"] = {"name": delta.name, "arguments": ""}
            else:
                entry["function"] = {"arguments": delta.text}
            made.append({"tool_calls": [entry]})
        elif isinstance(delta, (Content, Reasoning)):
            names = ("content",) if isinstance(delta, Content) else ("reasoning", "reasoning_content")
            if not made or names[0] not in made[-1]:
                made.append(dict.fromkeys(names, ""))
            for name in names:
                made[-1][name] += delta.text
    return made
