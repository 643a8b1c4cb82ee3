"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import StrictBool, StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .body import parse, validated
from .conversation import encode
from .errors import ApiError
from .protocol import Body, ChatBody, Items, TokenList
from .service import Service
from .text_logprobs import token_name
from .tools import tool_use

#: Items of an answer that are rendered at once, in about a millisecond.
_SLICE = 8192
_OF_CHAT = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "documents", "reasoning_effort"),
)


class TokenizeBody(Body):
    """A prompt, or messages for the chat template."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: StrictStr | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: StrictStr | None = None
    tokens: TokenList


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids that a request would have as its prompt."""
    body = await parse(service, request, TokenizeBody)
    service.admit(body.model)
    if (body.prompt is None) == (not body.messages):
        raise ApiError(400, "give either prompt, a text, or messages, a list that is not empty", "prompt")
    ids = await service.off_loop(lambda: _ids(service, body))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.engine.session.info.max_seq_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        tokenizer = service.engine.session.tokenizer
        answer["token_strs"] = await service.off_loop(lambda: [token_name(tokenizer, t) for t in ids])
    return _rendered(answer, len(ids))


def _rendered(answer: Mapping[str, Any], size: int) -> Response:
    """``answer`` as JSON; with lists or texts of more than a slice in ``size`` items, a slice at a time."""
    if size <= _SLICE:
        return JSONResponse(answer)
    return StreamingResponse(_in_slices(answer), media_type="application/json")


async def _in_slices(answer: Mapping[str, Any]) -> AsyncIterator[str]:
    """While something is rendered, no stream goes on."""
    before = "{"
    for name, value in answer.items():
        yield f"{before}{json.dumps(name)}:"
        before = ","
        if not isinstance(value, (list, str)):
            yield json.dumps(value)
            continue
        opening, between, closing = ('"', "", '"') if isinstance(value, str) else "[,]"
        yield opening
        for start in range(0, len(value), _SLICE):
            part = json.dumps(value[start : start + _SLICE], ensure_ascii=False, separators=(",", ":"))
            yield (between if start else "") + part[1:-1]
            await asyncio.sleep(0)
        yield closing
    yield "}"


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = await parse(service, request, DetokenizeBody)
    service.admit(body.model)
    session = service.engine.session

    def text() -> str:
        size = session.info.vocab_size
        for token in body.tokens:
            if not 0 <= token < size:
                raise ApiError(400, f"tokens holds {str(token)[:40]}; expected 0 to {size - 1}", "tokens")
        tokenizer = session.need_tokenizer()
        if len(body.tokens) <= _SLICE:
            return tokenizer.decode(body.tokens, skip_special_tokens=False)
        # The library decodes all of it in one go, in which no stream goes on.
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
        return "".join([detokenizer.push(token) for token in body.tokens]) + detokenizer.flush()

    return _rendered({"prompt": await service.off_loop(text)}, len(body.tokens))


async def tokenizer_info(service: Service) -> Response:
    """The checkpoint's tokenizer_config.json with its chat template and special tokens."""
    tokenizer = service.engine.session.need_tokenizer()
    templates = {name: template.source for name, template in tokenizer.chat_templates.items()}
    template = templates.get("default") if len(templates) < 2 else templates
    return JSONResponse({**tokenizer.config, **tokenizer.special_tokens, "chat_template": template})


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    tokenizer = service.engine.session.need_tokenizer()
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    chat = validated(ChatBody, {name: getattr(body, name) for name in _OF_CHAT})
    prompt = encode(tokenizer, chat, tool_use(chat.tools, None, True), service.style)
    # The template writes what special tokens the model wants; more only for who asks.
    extra = tokenizer.encode("", True) if body.add_special_tokens else []
    return [*extra, *prompt.ids]
