"""Answers of the Responses API: the object, its items, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from ..chat_turn import ChatTurn, Piece
from ..parsers import CallArguments, CallBroken, CallStart, Content, Delta, Message, Reasoning
from ..streaming import named_event
from .body import ResponsesBody


def new_response(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The object of a response that has just begun."""
    form = None if body.text is None else body.text.format
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": shown},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def finish(response: dict[str, Any], turn: ChatTurn, reason: str | None) -> None:
    """Write the end of a turn into its response."""
    usage = turn.usage()
    response["usage"] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
    if reason == "length":
        response["status"] = "incomplete"
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    else:
        response["status"] = "completed"
    response["completed_at"] = int(time.time())


def fail(response: dict[str, Any], message: str) -> None:
    """Write an error into a response."""
    response["status"] = "failed"
    response["error"] = {"code": "server_error", "message": message}


async def complete(turn: ChatTurn, response: dict[str, Any]) -> None:
    """Write the whole answer of a turn into its response."""
    (piece,) = await turn.whole()
    said = Message()
    said.add(piece.deltas)
    output = response["output"]
    if said.reasoning:
        output.append(_reasoning(said.reasoning))
    if said.content or not said.calls:
        output.append(_message(said.content))
    output += [_call(call.id or turn.make_id(), call.name, call.arguments) for call in said.calls.values()]
    finish(response, turn, piece.finish_reason)


class ResponseStream:
    """The events of one turn; the response is complete when they are over."""

    def __init__(self, turn: ChatTurn, response: dict[str, Any]) -> None:
        self._turn = turn
        self._response = response
        self._number = 0
        self._item: dict[str, Any] | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """All events, as bytes."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)
        async for batch in self._turn.pieces():
            parts = [part for piece in batch for part in self._piece(piece)]
            if parts:
                yield b"".join(parts)

    def failed(self, message: str) -> bytes:
        """The event of an error that ends the stream."""
        fail(self._response, message)
        return self._event("response.failed", response=self._response)

    def _piece(self, piece: Piece) -> list[bytes]:
        parts = [part for delta in piece.deltas for part in self._delta(delta)]
        if piece.finish_reason is not None:
            if self._item is None and not self._response["output"]:
                parts += self._open(_message(""))
            parts += self._close("completed" if piece.finish_reason != "length" else "incomplete")
            finish(self._response, self._turn, piece.finish_reason)
            parts.append(self._event(f"response.{self._response['status']}", response=self._response))
        return parts

    def _delta(self, delta: Delta) -> list[bytes]:
        if isinstance(delta, Content):
            opened = self._open_unless("message", _message(""))
            return [*opened, self._grown("response.output_text.delta", "text", delta.text)]
        if isinstance(delta, Reasoning):
            opened = self._open_unless("reasoning", _reasoning(""))
            return [*opened, self._grown("response.reasoning_text.delta", "text", delta.text)]
        if isinstance(delta, CallStart):
            call = _call(delta.id or self._turn.make_id(), delta.name, "")
            return [*self._close("completed"), *self._open(call)]
        if isinstance(delta, CallArguments):
            return [self._grown("response.function_call_arguments.delta", "arguments", delta.text)]
        assert isinstance(delta, CallBroken)
        return self._close("incomplete")

    def _open_unless(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        if self._item is not None and self._item["type"] == kind:
            return []
        return [*self._close("completed"), *self._open(item)]

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        self._item = item
        item["status"] = "in_progress"
        self._response["output"].append(item)
        # A part is announced by itself before its text comes.
        parts = item.get("content")
        shown = item if parts is None else {**item, "content": []}
        found = [self._event("response.output_item.added", output_index=self._place, item=shown)]
        if parts:
            found.append(self._event("response.content_part.added", part=parts[0], **self._in_part()))
        return found

    def _grown(self, kind: str, field: str, text: str) -> bytes:
        assert self._item is not None
        if field == "arguments":
            self._item["arguments"] += text
            return self._event(kind, item_id=self._item["id"], output_index=self._place, delta=text)
        self._item["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if self._item["type"] == "message" else {}
        return self._event(kind, **self._in_part(), delta=text, **logprobs)

    def _close(self, status: str) -> list[bytes]:
        item, self._item = self._item, None
        if item is None:
            return []
        item["status"] = status
        place = {"item_id": item["id"], "output_index": self._place}
        found = []
        if item["type"] == "function_call":
            named = {**place, "name": item["name"], "arguments": item["arguments"]}
            found.append(self._event("response.function_call_arguments.done", **named))
        else:
            part = item["content"][0]
            inside = {**place, "content_index": 0}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            found.append(self._event(f"response.{kind}.done", **inside, text=part["text"], **logprobs))
            found.append(self._event("response.content_part.done", **inside, part=part))
        found.append(self._event("response.output_item.done", output_index=self._place, item=item))
        return found

    @property
    def _place(self) -> int:
        return len(self._response["output"]) - 1

    def _in_part(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(data)


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    made = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    return {**made, "status": "completed", "content": [part]}


def _reasoning(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    made = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
    return {**made, "status": "completed", "content": [part]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    made = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call_id}
    return {**made, "name": name, "arguments": arguments, "status": "completed"}
