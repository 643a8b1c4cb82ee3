"""Answers in Anthropic's form: whole messages, events of a stream, errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from ..chat_turn import ChatTurn, Piece
from ..errors import describe
from ..parsers import CallArguments, CallStart, Content, Delta, Message, Reasoning
from ..streaming import named_event

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception."""
    status, body = describe(error)
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class Answer:
    """Builds the message of one turn."""

    def __init__(self, turn: ChatTurn) -> None:
        self._turn = turn
        self._open: str | None = None  # the type of the block that is being streamed
        self._index = -1

    async def whole(self) -> dict[str, Any]:
        """The message without a stream."""
        (piece,) = await self._turn.whole()
        said = Message()
        said.add(piece.deltas)
        content: list[dict[str, Any]] = []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.content:
            content.append({"type": "text", "text": said.content})
        for call in said.calls.values():
            content.append(
                {
                    "type": "tool_use",
                    "id": call.id or self._turn.make_id(),
                    "name": call.name,
                    "input": json.loads(call.arguments),
                }
            )
        return {**self._head(), "content": content, **_end(piece), "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The message as a stream: its head, blocks one after the other, its end."""
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event({"type": "message_start", "message": {**start, "usage": self._usage()}})
        yield named_event({"type": "ping"})
        async for batch in self._turn.pieces():
            parts: list[bytes] = []
            for piece in batch:
                for delta in piece.deltas:
                    parts += self._delta(delta)
                if piece.finish_reason is not None:
                    parts += self._closed()
                    parts.append(
                        named_event({"type": "message_delta", "delta": _end(piece), "usage": self._usage()})
                    )
                    parts.append(named_event({"type": "message_stop"}))
            if parts:
                yield b"".join(parts)

    def _delta(self, delta: Delta) -> list[bytes]:
        if isinstance(delta, Content):
            opened = self._block("text", {"type": "text", "text": ""})
            return [*opened, self._piece({"type": "text_delta", "text": delta.text})]
        if isinstance(delta, Reasoning):
            opened = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*opened, self._piece({"type": "thinking_delta", "thinking": delta.text})]
        if isinstance(delta, CallStart):
            block = {
                "type": "tool_use",
                "id": delta.id or self._turn.make_id(),
                "name": delta.name,
                "input": {},
            }
            return self._block(f"tool_use {delta.index}", block)
        if isinstance(delta, CallArguments):
            return [self._piece({"type": "input_json_delta", "partial_json": delta.text})]
        return []

    def _block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Events that make a block of this kind the open one."""
        if kind == self._open:
            return []
        parts = self._closed()
        self._open, self._index = kind, self._index + 1
        return [
            *parts,
            named_event({"type": "content_block_start", "index": self._index, "content_block": block}),
        ]

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [named_event({"type": "content_block_stop", "index": self._index})]

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
        }

    def _usage(self) -> dict[str, int]:
        usage = self._turn.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _end(piece: Piece) -> dict[str, Any]:
    stop = piece.update.stop_reason
    by_string = piece.finish_reason == "stop" and isinstance(stop, str)
    reason = "stop_sequence" if by_string else _STOP_REASONS.get(str(piece.finish_reason), "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop if by_string else None}
