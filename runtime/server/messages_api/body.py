"""Request bodies of /v1/messages; unknown fields are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from ..protocol import Body, Items, Number


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How much to think, and the form of the answer."""

    effort: StrictStr | None = None
    format: OutputFormat | None = None


class Thinking(Body):
    """Whether to think; a budget is not followed."""

    type: Literal["enabled", "disabled", "adaptive"]


class ToolChoice(Body):
    """Which tools to use."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: StrictStr | None = None
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    system: StrictStr | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_sequences: (
        Annotated[Items[Annotated[StrictStr, Field(min_length=1)]], Field(max_length=64)] | None
    ) = None
    stream: StrictBool | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] | None = None
    top_p: Number | None = None
