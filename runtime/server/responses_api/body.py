"""Request bodies of /v1/responses; unknown fields are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from ..protocol import Body, Items, Number


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextConfig(Body):
    """About the text of the answer."""

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """About the reasoning."""

    effort: StrictStr | None = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: StrictStr | None = None
    input: StrictStr | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[StrictInt, Field(ge=1)] | None = None
    metadata: Annotated[dict[str, StrictStr], Field(max_length=16)] | None = None
    parallel_tool_calls: StrictBool | None = None
    previous_response_id: StrictStr | None = None
    reasoning: ReasoningConfig | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    background: StrictBool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: TextConfig | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    cache_salt: StrictStr | None = None
    priority: StrictInt | None = None
    conversation: Any = None
    prompt: Any = None
