"""Routes of the APIs beside OpenAI's completions: Anthropic's messages, OpenAI's responses, the tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from .error_forms import error_response
from .messages_api.body import CountBody, MessagesBody
from .messages_api.endpoints import count_tokens, create_message
from .openapi import request_schema
from .responses_api.body import ResponsesBody
from .responses_api.endpoints import Responses
from .service import Service
from .tokenization import DetokenizeBody, TokenizeBody, detokenize, tokenize, tokenizer_info

_Answering = Callable[[Awaitable[Response]], Awaitable[Response]]


def refuse(service: Service, path: str, error: Exception) -> Response:
    """The answer to a request that does not come as far as its route."""
    answer = error_response(path, error)
    service.metrics.refused(answer.status_code)
    return answer


def install(app: FastAPI, service: Service, answer: _Answering) -> None:
    """Add the routes; ``answer`` waits for work that a client may leave, or that a shutdown cuts off."""

    @app.post("/v1/messages", openapi_extra=request_schema(MessagesBody))
    async def post_messages(request: Request) -> Response:
        return await answer(create_message(service, request))

    @app.post("/v1/messages/count_tokens", openapi_extra=request_schema(CountBody))
    async def post_count_tokens(request: Request) -> Response:
        return await answer(count_tokens(service, request))

    responses = Responses(service)

    @app.post("/v1/responses", openapi_extra=request_schema(ResponsesBody))
    async def post_responses(request: Request) -> Response:
        return await answer(responses.create(request))

    @app.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> Response:
        return await responses.get(response_id)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        return await responses.delete(response_id)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str) -> Response:
        return await responses.cancel(response_id)

    @app.post("/tokenize", openapi_extra=request_schema(TokenizeBody))
    async def post_tokenize(request: Request) -> Response:
        return await answer(tokenize(service, request))

    @app.post("/detokenize", openapi_extra=request_schema(DetokenizeBody))
    async def post_detokenize(request: Request) -> Response:
        return await answer(detokenize(service, request))

    if service.config.tokenizer_info:

        @app.get("/tokenizer_info")
        async def get_tokenizer_info() -> Response:
            return await tokenizer_info(service)
