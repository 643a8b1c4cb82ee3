"""Request bodies of the OpenAI API as far as they are served; unknown fields are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from ..sampling_params import MAX_N

_T = TypeVar("_T")
#: A list whose first wrong item is told: one after the other millions of them would be noted.
Items = Annotated[list[_T], Field(fail_fast=True)]
TokenList = Items[StrictInt]
#: JSON numbers; true and "1" are none.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Body(BaseModel):
    """Of all bodies: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Body):
    """What to add to a stream."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class JsonSchemaFormat(Body):
    """OpenAI's wrapping of a schema."""

    name: StrictStr | None = None
    #: Absent: any JSON object.
    schema_: dict[str, Any] | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """How the answer is to be shaped."""

    type: StrictStr = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's extension: exactly one of the fields."""

    #: A schema, or its text.
    json_: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: Items[StrictStr] | None = None
    grammar: StrictStr | None = None


class _Generation(Body):
    """Fields that both endpoints share; None = the model's default, else the API's."""

    model: StrictStr | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    top_p_decay: Number | None = None
    top_p_min: Number | None = None
    top_p_reset_ids: StrictInt | TokenList | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    seed: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    use_beam_search: StrictBool | None = None
    length_penalty: Number | None = None
    early_stopping: StrictBool | Literal["never"] | None = None
    stop: StrictStr | Items[StrictStr] | None = None
    stop_token_ids: TokenList | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    priority: StrictInt | None = None
    cache_salt: StrictStr | None = None
    num_speculative_tokens: StrictInt | None = None
    max_tokens: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    #: In log-probabilities: "token_id:N" for each token, which no two tokens share.
    return_tokens_as_token_ids: StrictBool | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: TokenList | None = None
    bad_words: Items[StrictStr] | None = None
    no_repeat_ngram_size: StrictInt | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: StrictInt | None = None
    truncate_prompt_tokens: StrictInt | None = None


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: StrictStr | Items[StrictStr] | TokenList | Items[TokenList]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool | None = None


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    #: Given to the chat template, which knows what to do with it or ignores it.
    reasoning_effort: Annotated[StrictStr, Field(max_length=64)] | None = None
    include_reasoning: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
