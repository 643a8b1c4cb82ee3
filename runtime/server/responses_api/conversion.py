"""A request of the Responses API as a chat request: items become messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..body import validated
from ..errors import ApiError
from ..protocol import ChatBody
from .body import ResponsesBody

Item = dict[str, Any]
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "cache_salt", "priority", "parallel_tool_calls"),
    "chat_template_kwargs",
)
_TEXT_PARTS = ("input_text", "output_text", "text")


def input_items(body: ResponsesBody) -> list[Item]:
    """The input as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def chat_body(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The same request for ``ChatTurn``.

    Args:
        items: of the conversation so far, the request's own last.

    Raises:
        ApiError: 400 for items and tools that are not served.
    """
    made: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    made["messages"] = _messages(body.instructions, items)
    made["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        made["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    made["tool_choice"] = _choice(body.tool_choice) if body.tools or body.tool_choice != "auto" else None
    if body.reasoning is not None:
        made["reasoning_effort"] = body.reasoning.effort
    if body.truncation == "auto":
        made["truncate_prompt_tokens"] = -1
    form = None if body.text is None else body.text.format
    if form is not None and form.type != "text":
        made["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise ApiError(400, "text.format of type json_schema needs the field schema", "text")
            made["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
    return validated(ChatBody, made)


def _messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        [] if instructions is None else [{"role": "system", "content": instructions}]
    )
    thought: str | None = None
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = _parts(i, item.get("content") or [], ("reasoning_text", "text"))
            continue
        if kind == "function_call":
            message = _caller(found, thought)
            message.setdefault("tool_calls", []).append(_call(i, item))
        elif kind == "function_call_output":
            call = _string(i, item, "call_id")
            output = item.get("output")
            text = output if isinstance(output, str) else _parts(i, output, _TEXT_PARTS)
            found.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "message":
            content = item.get("content")
            text = content if isinstance(content, str) else _parts(i, content, _TEXT_PARTS)
            message = {"role": _string(i, item, "role"), "content": text}
            if thought and message["role"] == "assistant":
                message["reasoning"] = thought
            found.append(message)
        else:
            raise ApiError(400, f"input[{i}] is of type {str(kind)[:80]!r}, which is not supported", "input")
        thought = None
    if not found:
        raise ApiError(400, "input holds reasoning alone; expected a message, or what a call gave", "input")
    return found


def _caller(found: list[dict[str, Any]], thought: str | None) -> dict[str, Any]:
    """The assistant's message that a call belongs to: the last one, or a new one."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    if thought:
        found[-1]["reasoning"] = found[-1].get("reasoning", "") + thought
    return found[-1]


def _call(i: int, item: Item) -> dict[str, Any]:
    function = {"name": _string(i, item, "name"), "arguments": _string(i, item, "arguments")}
    return {"id": _string(i, item, "call_id"), "type": "function", "function": function}


def _parts(i: int, parts: Any, kinds: tuple[str, ...]) -> str:
    if not isinstance(parts, list):
        raise ApiError(400, f"input[{i}] has content that is neither a text nor a list of parts", "input")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        name = "refusal" if kind == "refusal" else "text"
        if kind in (*kinds, "refusal") and not isinstance(part.get(name), str):
            raise ApiError(
                400, f"input[{i}] holds a part of type {kind!r} that has no text {name!r}", "input"
            )
        if kind not in (*kinds, "refusal"):
            raise ApiError(
                400,
                f"input[{i}] holds a part of type {str(kind)[:80]!r}; expected {', '.join(kinds)}",
                "input",
            )
        texts.append(part[name])
    return "".join(texts)


def _string(i: int, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"input[{i}] has no text {name!r}", "input")
    return value


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"tools[{i}] has type {str(tool.get('type'))[:80]!r}; expected function", "tools")
    function = {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_named(t) if isinstance(t, dict) else t for t in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if isinstance(choice, dict):
        return _named(choice)
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ApiError(
            400, f"tool_choice is {choice[:80]!r}; expected none, auto, required or a function", "tool_choice"
        )
    return choice


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    """A function by name in the form of a chat; anything else as it is, to be refused there."""
    if tool.get("type") == "function" and "name" in tool:
        return {"type": "function", "function": {"name": tool["name"]}}
    return tool
