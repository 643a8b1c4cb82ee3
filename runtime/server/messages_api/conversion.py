"""A request of Anthropic's form as a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..body import validated
from ..errors import ApiError
from ..protocol import ChatBody
from .body import CountBody, MessagesBody, ToolChoice

#: Names of one thing in the templates of Qwen 3 and DeepSeek V3.1.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


def chat_body(body: CountBody) -> ChatBody:
    """The same request for ``ChatTurn``.

    Raises:
        ApiError: 400 for blocks and tools that are not served.
    """
    made: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].get("role") == "assistant":
        # What is put into the model's mouth is gone on with.
        made["continue_final_message"] = True
    if body.tools:
        made["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        made["tool_choice"] = _choice(body.tool_choice)
        made["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        made["chat_template_kwargs"] = dict.fromkeys(_THINKING_SWITCHES, thinks)
        made["include_reasoning"] = thinks
    if body.output_config is not None:
        made["reasoning_effort"] = body.output_config.effort
        if (form := body.output_config.format) is not None:
            made["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        made |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
        }
    return validated(ChatBody, made)


def _messages(body: CountBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _text("system", body.system)})
    for i, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        place = f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise ApiError(
                400, f"{place} has the role {str(role)[:80]!r}; expected user or assistant", "messages"
            )
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise ApiError(400, f"{place}.content is neither a text nor a list of blocks", "messages")
        elif role == "assistant":
            found.append(_assistant(place, content))
        else:
            found += _user(role, place, content)
    return found


def _assistant(place: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(place, block, "text"))
        elif kind == "thinking":
            thoughts.append(_string(place, block, "thinking"))
        elif kind == "tool_use":
            if not isinstance(block.get("input", {}), dict):
                raise ApiError(400, f"{place}: the input of a tool_use block is no object", "messages")
            function = {
                "name": _string(place, block, "name"),
                "arguments": json.dumps(block.get("input", {})),
            }
            calls.append({"id": _string(place, block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unknown(place, kind)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return message


def _user(role: str, place: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools first, as messages of their own, then what the user says."""
    results, texts = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": _string(place, block, "text")})
        elif kind == "tool_result":
            content = _text(place, block.get("content") or "")
            call = _string(place, block, "tool_use_id")
            results.append({"role": "tool", "tool_call_id": call, "content": content})
        else:
            raise _unknown(place, kind)
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _text(place: str, content: Any) -> str:
    """A text, or blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is neither a text nor a list of blocks", "messages")
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unknown(place, block.get("type") if isinstance(block, dict) else block)
        texts.append(_string(place, block, "text"))
    return "\n".join(texts)


def _string(place: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: a block of type {block.get('type')} has no text {name!r}", "messages")
    return value


def _unknown(place: str, kind: object) -> ApiError:
    return ApiError(
        400, f"{place} holds a block of type {str(kind)[:80]!r}, which is not supported", "messages"
    )


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ApiError(
            400,
            f"tools[{i}] has type {str(tool['type'])[:80]!r}; expected a tool of the client's own",
            "tools",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
