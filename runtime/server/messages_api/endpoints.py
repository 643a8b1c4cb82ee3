"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from castiron.errors import CastironError

from ...request_errors import called
from ..body import parse
from ..chat_turn import ChatTurn, checked_tools
from ..conversation import encode
from ..errors import ApiError, response
from ..service import Service
from ..streaming import EventStream, named_event, while_connected
from .answer import Answer, error_body
from .body import CountBody, MessagesBody
from .conversion import chat_body


async def create_message(service: Service, request: Request) -> Response:
    """Answer one request."""
    try:
        body = await parse(service, request, MessagesBody)
        chat = await service.by_size(lambda: chat_body(body))
        with called({"stop": "stop_sequences"}):
            turn = await ChatTurn.begin(service, chat)
        answer = Answer(turn)
        if body.stream:
            return EventStream(
                answer.events(), turn.close, lambda error: named_event(error_body(error)[1]), b""
            )
        try:
            return JSONResponse(await while_connected(request.receive, answer.whole()))
        finally:
            turn.close()
    except (ApiError, CastironError) as error:
        return refusal(service, error)


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt of a message has."""
    try:
        counted = await parse(service, request, CountBody)
        body = await service.by_size(lambda: chat_body(counted))
        service.admit(body.model)
        use = checked_tools(service, body)
        tokenizer = service.engine.session.need_tokenizer
        prompt = await service.off_loop(lambda: encode(tokenizer(), body, use, service.style))
        return JSONResponse({"input_tokens": len(prompt.ids)})
    except (ApiError, CastironError) as error:
        return refusal(service, error)


def error_response(error: Exception) -> Response:
    """An error in Anthropic's envelope, with the headers that it has in OpenAI's."""
    known = response(error)
    status, body = error_body(error)
    headers = {k: v for k, v in known.headers.items() if k not in ("content-length", "content-type")}
    return JSONResponse(body, status, headers)


def refusal(service: Service, error: Exception) -> Response:
    """``error_response``, counted."""
    answer = error_response(error)
    service.metrics.refused(answer.status_code)
    return answer
