"""Tools of a request: which functions there are, and whether and which the model is to call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError

#: What a function may be called. A name that a model has made up is passed on, for the client to refuse.
FUNCTION_NAME = re.compile(r"[\w.:/@-]{1,128}", re.ASCII)
#: Each has a schema in the prompt and a rule in the grammar.
_MAX_TOOLS = 1024


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of an object; None = no arguments.
    """

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools.

    Attributes:
        tools: as given, for the chat template.
        functions: those that may be called: all, or what ``tool_choice`` names of them.
        required: the answer is a call, nothing else.
        parallel: there may be several calls in one answer.
    """

    tools: Sequence[dict[str, Any]]
    functions: tuple[Function, ...]
    required: bool
    parallel: bool

    @property
    def limited(self) -> bool:
        """The model is told of functions that it may not call."""
        return len(self.functions) < len(self.tools)


def tool_use(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool
) -> ToolUse | None:
    """Check what OpenAI's ``tools``, ``tool_choice`` and ``parallel_tool_calls`` say; None = no calls.

    Raises:
        ApiError: 400 with the field.
    """
    if tools is not None and not tools:
        raise ApiError(400, "tools is an empty list; leave it out instead", "tools")
    if tools is None:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > _MAX_TOOLS:
        raise ApiError(400, f"tools has {len(tools)} entries; expected at most {_MAX_TOOLS}", "tools")
    functions = tuple(_function(i, tool) for i, tool in enumerate(tools))
    counts = Counter(f.name for f in functions)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ApiError(400, f"tools has two functions called {twice!r}; give each a name of its own", "tools")
    if choice == "none":
        return None
    if not isinstance(choice, dict):
        return ToolUse(tools, functions, choice == "required", parallel)
    if choice.get("type") == "allowed_tools":
        allowed, required = _allowed(choice.get("allowed_tools"), functions)
        return ToolUse(tools, allowed, required, parallel)
    return ToolUse(tools, (_named(choice, functions),), True, parallel)


def _function(i: int, tool: Mapping[str, Any]) -> Function:
    kind = tool.get("type", "function")
    if kind != "function":
        raise ApiError(400, f"tools[{i}] has type {str(kind)[:80]!r}; expected function", "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ApiError(400, f"tools[{i}] has no object function", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise ApiError(
            400,
            f"tools[{i}] has the name {str(name)[:80]!r}; expected 1 to 128 letters, digits or _ . : / @ -",
            "tools",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"the parameters of {name!r} are no JSON schema (an object)", "tools")
    if parameters and parameters.get("type", "object") != "object":
        raise ApiError(
            400,
            f"the parameters of {name!r} have type {str(parameters['type'])[:80]!r}; expected object",
            "tools",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ApiError(400, f"the description of {name!r} is no text", "tools")
    return Function(name, parameters)


def _allowed(allowed: object, functions: Sequence[Function]) -> tuple[tuple[Function, ...], bool]:
    """What ``allowed_tools`` names, in the order of the tools, and whether one of them must be called."""
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise ApiError(
            400,
            "tool_choice of type allowed_tools needs an object allowed_tools with a mode, auto or required, "
            "and a list of one or more tools",
            "tool_choice",
        )
    names = {_named(tool if isinstance(tool, dict) else {}, functions).name for tool in named}
    return tuple(f for f in functions if f.name in names), mode == "required"


def _named(choice: Mapping[str, Any], functions: Sequence[Function]) -> Function:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise ApiError(
            400,
            "tool_choice names a tool in another form; expected none, auto, required, or, also in "
            'allowed_tools, {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    found = next((f for f in functions if f.name == name), None)
    if found is None:
        raise ApiError(400, f"tool_choice names {name[:80]!r}, which is none of the tools", "tool_choice")
    return found
