"""From a chat request to a prompt: messages as chat templates expect them, and the template's variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castiron.errors import RequestError

from ..tokenizer import Tokenizer
from .errors import ApiError
from .parsers import AnswerStyle
from .parsers.json_scanner import json_object
from .protocol import ChatBody
from .tools import ToolUse

#: What the template gets from the request's own fields, which chat_template_kwargs must not contradict.
_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Prompt:
    """Token ids of a conversation; ``opened``: it ends with the beginning of the reasoning."""

    ids: list[int]
    opened: bool


def encode(tokenizer: Tokenizer, body: ChatBody, use: ToolUse | None, style: AnswerStyle) -> Prompt:
    """The prompt of a request; to be called on a worker thread.

    Raises:
        ApiError, RequestError: messages that are none, or that the template refuses.
    """
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in _OWN_FIELDS:
            raise ApiError(
                400,
                f"chat_template_kwargs holds {name!r}, which is a field of the request itself",
                "chat_template_kwargs",
            )
    if body.documents is not None:
        options["documents"] = body.documents
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    goes_on = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    variables = {
        **options,
        "tools": None if use is None else use.tools,
        "add_generation_prompt": not goes_on if begins is None else begins,
        "continue_final_message": goes_on,
    }
    messages = [_prepared(i, message, style.template) for i, message in enumerate(body.messages)]
    text = _rendered(tokenizer, messages, variables)
    return Prompt(tokenizer.encode(text, add_special_tokens=False), style.opens_reasoning(text))


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The prompt's text. Templates do not agree on what arguments of calls are, objects or their text, nor on
    the content of a message without any: where one way fails, the others are tried.
    """
    first: RequestError | None = None
    for other_content in (False, True):
        for arguments_as_text in (False, True):
            try:
                chat = [_in_another_way(m, arguments_as_text, other_content) for m in messages]
                return tokenizer.render_chat(chat, **variables)
            except RequestError as error:
                if not any("tool_calls" in m for m in messages):
                    raise
                first = first or error
    assert first is not None
    raise first


def _in_another_way(message: dict[str, Any], arguments_as_text: bool, other_content: bool) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    made = dict(message)
    if other_content and not made.get("content"):
        made["content"] = None if made.get("content") == "" else ""
    if arguments_as_text:
        calls = []
        for call in made["tool_calls"]:
            text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        made["tool_calls"] = calls
    return made


def _prepared(i: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as templates know it: arguments of calls are objects, reasoning has all its names."""
    made = dict(message)
    # OpenAI's newer name for what most templates know as the system's messages.
    if made.get("role") == "developer" and "developer" not in template:
        made["role"] = "system"
    if (calls := made.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise ApiError(400, f"messages[{i}].tool_calls is no list", "messages")
        made["tool_calls"] = [_call(i, call) for call in calls]
        if not calls:
            del made["tool_calls"]
    thought = next((made[n] for n in _REASONING_FIELDS if isinstance(made.get(n), str)), None)
    if thought is not None:
        made.update(dict.fromkeys(_REASONING_FIELDS, thought))
    return made


def _call(i: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400,
            f"messages[{i}].tool_calls holds no function with a name; expected "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
            "messages",
        )
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = json_object(arguments)
    if not isinstance(arguments, dict):
        raise ApiError(
            400, f"messages[{i}]: the arguments of {function['name'][:80]!r} are no JSON object", "messages"
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
