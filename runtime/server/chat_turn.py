"""One turn of the assistant: from a chat request to the pieces of its answers, for whatever API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..outputs import Update, joined
from ..param_values import as_integer
from ..request_errors import ParameterError, called
from ..sampling_params import MAX_LOGPROBS, SamplingParams
from .answer_form import answer_form
from .conversation import Prompt, encode
from .errors import ApiError
from .generation import Choice, Generation
from .parsers import AnswerStyle, CallArguments, CallBroken, CallStart, Content, Delta, Reasoning
from .protocol import ChatBody
from .service import Service, refuse_unserved
from .streaming import WriteNow
from .structured import structured_output
from .tools import ToolUse, tool_use


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of the engine added to one output.

    Attributes:
        update: the tokens, and all that belongs to them.
        deltas: what their text means.
        finish_reason: OpenAI's, with the last piece.
    """

    choice: Choice
    update: Update
    deltas: list[Delta]
    finish_reason: str | None


class ChatTurn:
    """The outputs of one request, read in the model's style; leave it by ``close`` in any case.

    ``begin`` makes one.
    """

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        generation: Generation,
        use: ToolUse | None,
        opened: bool,
        n: int,
    ) -> None:
        self._generation = generation
        self._n = n
        self.count = len(generation.choices)
        self.model = generation.lora or service.model
        self.make_id = service.style.make_id
        self._reasons = service.style.reasoning is not None
        self._outputs = [
            _Output(service.style, use, opened, body.include_reasoning is not False)
            for _ in generation.choices
        ]

    @classmethod
    async def begin(cls, service: Service, body: ChatBody) -> ChatTurn:
        """Check a request and start its outputs.

        Raises:
            ApiError, RequestError: it cannot be served.
        """
        lora = service.admit(body.model)
        _check(body)
        use = checked_tools(service, body)
        service.admit_outputs(1, body)
        try:
            with called(_names(body)):
                prompt, params = await service.off_loop(lambda: _prepared(service, body, lora, use))
                async with service.engine.prepared(params):
                    generation = Generation(service, [prompt.ids], params)
        except ParameterError as e:
            if use is not None and e.param in ("structured_outputs", "lark"):
                raise ParameterError(f"of the tools, or response_format: {e}", "tools") from None
            raise
        return cls(service, body, generation, use, prompt.opened, params.n)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, all that wait at once, until every output is finished.

        Raises:
            RequestError: an output ended with an error.
        """
        async for batch in self._generation.batches():
            yield [
                Piece(choice, update, *self._outputs[choice.index].take(update)) for choice, update in batch
            ]

    async def whole(self) -> list[Piece]:
        """Each output as one piece."""
        found: list[list[Piece]] = [[] for _ in self._outputs]
        async for batch in self.pieces():
            for piece in batch:
                found[piece.choice.index].append(piece)
        return [
            Piece(
                pieces[0].choice,
                joined([piece.update for piece in pieces]),
                [delta for piece in pieces for delta in piece.deltas],
                pieces[-1].finish_reason,
            )
            for pieces in found
        ]

    @property
    def choices(self) -> list[Choice]:
        """The outputs."""
        return self._generation.choices

    def shorten(self, write_now: WriteNow, makers: Sequence[Callable[[str], bytes]]) -> None:
        """See ``Generation.shorten``; where text may mean anything but content, all goes by ``pieces``."""
        if all(output.plain for output in self._outputs):
            self._generation.shorten(write_now, makers)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        thought = sum(output.reasoning_tokens for output in self._outputs)
        details = {"completion_tokens_details": {"reasoning_tokens": thought}} if self._reasons else {}
        return {**self._generation.usage(self._n), **details}

    def close(self) -> None:
        """Free what still runs in the engine."""
        self._generation.close()


class _Output:
    """Reads one output; ``reasoning_tokens`` are those whose text was reasoning, by the step they came in."""

    def __init__(self, style: AnswerStyle, use: ToolUse | None, opened: bool, reasoning: bool) -> None:
        functions = None if use is None else {f.name: f.parameters for f in use.functions}
        self._parser = style.parser(functions, opened, only_known=use is not None and use.limited)
        self._parallel = use is None or use.parallel
        self._reasoning = reasoning
        self.reasoning_tokens = 0
        self._calls: set[int] = set()

    @property
    def plain(self) -> bool:
        """All text is content."""
        return self._parser is None

    def take(self, update: Update) -> tuple[list[Delta], str | None]:
        """What an update means, and OpenAI's reason of the end if it is the last one."""
        if self._parser is None:
            return ([Content(update.text)] if update.text else []), update.finish_reason
        deltas = self._parser.push(update.text) if update.text else []
        if update.finish_reason is not None:
            deltas += self._parser.flush()
        if any(isinstance(delta, Reasoning) for delta in deltas):
            self.reasoning_tokens += len(update.token_ids)
        deltas = [delta for delta in deltas if self._wanted(delta)]
        for delta in deltas:
            if isinstance(delta, CallStart):
                self._calls.add(delta.index)
            elif isinstance(delta, CallBroken):
                self._calls.discard(delta.index)
        called = update.finish_reason == "stop" and self._calls
        return deltas, "tool_calls" if called else update.finish_reason

    def _wanted(self, delta: Delta) -> bool:
        if isinstance(delta, Reasoning):
            return self._reasoning
        more = isinstance(delta, (CallStart, CallArguments, CallBroken)) and delta.index > 0
        return self._parallel or not more


def checked_tools(service: Service, body: ChatBody) -> ToolUse | None:
    """What a request says about tools; ApiError where it is wrong, or the model's calls cannot be read."""
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
    if use is not None and service.style.tools is None:
        raise ApiError(
            501,
            "this server does not know how its model writes tool calls: the chat template is of no known "
            "style; start it with --tool-call-parser, or set tool_choice to none",
            "tools",
        )
    return use


def _check(body: ChatBody) -> None:
    refuse_unserved(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.top_logprobs is not None:
        as_integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)


def _names(body: ChatBody) -> dict[str, str]:
    """The request's names for parameters that it calls otherwise than completions do."""
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def _prepared(
    service: Service, body: ChatBody, lora: str | None, use: ToolUse | None
) -> tuple[Prompt, SamplingParams]:
    """Prompt and parameters; on a worker thread."""
    prompt = encode(service.engine.session.need_tokenizer(), body, use, service.style)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise ParameterError("max_completion_tokens is 0; expected at least 1", "max_completion_tokens")
    form = answer_form(structured_output(body), use, service.style, prompt.opened)
    changes: dict[str, Any] = {}
    if use is not None or service.style.reasoning is not None:
        changes["shown_special_tokens"] = service.style.shown_tokens
        changes["reasoning_markers"] = service.style.reasoning_markers(prompt.opened)
    return prompt, service.params(
        body,
        lora=lora,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_output=form,
        **changes,
    )
