"""What a request asks its answer's form to be: response_format, or vLLM's structured_outputs."""

from __future__ import annotations

from ..structured_output import StructuredOutput
from .errors import ApiError
from .protocol import ChatBody, CompletionBody, ResponseFormat


def structured_output(body: CompletionBody | ChatBody) -> StructuredOutput | None:
    """The form, or None for free text.

    Raises:
        ApiError: an unknown type, or both fields at once.
        ParameterError: the form itself is wrong.
    """
    wanted = body.structured_outputs
    if wanted is not None:
        if body.response_format is not None and body.response_format.type != "text":
            raise ApiError(400, "give response_format or structured_outputs, not both", "structured_outputs")
        return StructuredOutput(
            json=wanted.json_,
            json_object=wanted.json_object,
            regex=wanted.regex,
            choice=None if wanted.choice is None else tuple(wanted.choice),
            grammar=wanted.grammar,
        )
    return None if body.response_format is None else _from_format(body.response_format)


def _from_format(wanted: ResponseFormat) -> StructuredOutput | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutput(json_object=True)
    if wanted.type != "json_schema":
        raise ApiError(
            400,
            f"response_format has type {wanted.type[:80]!r}; expected text, json_object or json_schema",
            "response_format",
        )
    if wanted.json_schema is None:
        raise ApiError(
            400, "response_format of type json_schema needs the field json_schema", "response_format"
        )
    schema = wanted.json_schema.schema_
    if schema is None or schema is True:
        return StructuredOutput(json_object=True)
    if schema is False:
        raise ApiError(400, "the JSON schema is false: no text matches it", "response_format")
    return StructuredOutput(json=schema)
