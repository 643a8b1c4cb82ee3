"""The styles of calls and of reasoning by name, and which of them a chat template speaks."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from castiron.errors import EngineError

from ..tools import Function
from . import call_grammars, deepseek, glm, harmony, hermes, kimi, llama, mistral, pythonic, qwen_coder
from .deepseek import DeepSeekParser
from .deltas import Delta
from .glm import GlmParser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .kimi import KimiParser
from .lark import Lark
from .llama import LlamaJsonParser
from .mistral import MistralParser
from .parser import Functions, Parser
from .pythonic import PythonicParser
from .qwen_coder import QwenCoderParser
from .think import Reasoned, ThinkParser


class AnswerParser(Protocol):
    """Splits the text of one output into deltas."""

    def push(self, text: str) -> list[Delta]:
        """Add a piece of the text; returns what is now certain."""

    def flush(self) -> list[Delta]:
        """The text is over; returns what is left."""


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    # Mistral's templates refuse others.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolStyle:
    """A way to write calls.

    Attributes:
        parser: reads it.
        grammar: writes the grammar of one or several calls; the source of the chat template tells it variants
            of the style apart.
        markers: texts that the parser looks for, and that may be special tokens.
        signs: a chat template with one of them is of this style, unless it has one of ``but_not``.
    """

    parser: type[Parser]
    grammar: Callable[[Lark, Sequence[Function], bool, str], str]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    but_not: tuple[str, ...] = ()
    make_id: Callable[[], str] = _openai_id


@dataclass(frozen=True)
class ReasoningStyle:
    """A way to write reasoning; ``markers`` open and close it, ``signs`` as of ``ToolStyle``."""

    markers: tuple[str, str]
    signs: tuple[str, ...]


#: In the order in which they are looked for.
TOOL_STYLES: Mapping[str, ToolStyle] = {
    "openai": ToolStyle(
        HarmonyParser,
        call_grammars.harmony_calls,
        (harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN, *harmony.ENDS),
        ("<|channel|>",),
    ),
    "deepseek_v3": ToolStyle(
        DeepSeekParser,
        call_grammars.deepseek_calls,
        (
            *(deepseek.OPEN, deepseek.CLOSE, deepseek.CALL_OPEN),
            *(deepseek.SEPARATOR, deepseek.CALL_CLOSE),
        ),
        ("<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>"),
    ),
    "mistral": ToolStyle(
        MistralParser,
        call_grammars.mistral_calls,
        (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
        ("[TOOL_CALLS]",),
        make_id=_mistral_id,
    ),
    "pythonic": ToolStyle(
        PythonicParser,
        call_grammars.pythonic_calls,
        (pythonic.OPEN, pythonic.CLOSE),
        ("<|python_start|>", "[func_name1("),
    ),
    "llama3_json": ToolStyle(
        LlamaJsonParser,
        call_grammars.llama_json_calls,
        (llama.PYTHON_TAG,),
        ("<|python_tag|>", '"parameters": dictionary of argument name'),
        but_not=("<function=",),
    ),
    "kimi_k2": ToolStyle(
        KimiParser,
        call_grammars.kimi_calls,
        (kimi.OPEN, kimi.CLOSE, kimi.CALL_OPEN, kimi.ARGUMENTS, kimi.CALL_CLOSE),
        (kimi.OPEN,),
    ),
    "qwen3_coder": ToolStyle(
        QwenCoderParser,
        call_grammars.qwen_coder_calls,
        (
            *(qwen_coder.OPEN, qwen_coder.CLOSE, qwen_coder.FUNCTION, qwen_coder.FUNCTION_END),
            *(qwen_coder.PARAMETER, qwen_coder.PARAMETER_END),
        ),
        (qwen_coder.PARAMETER,),
        # Seed-OSS has these between markers of its own.
        but_not=("<seed:tool_call>",),
    ),
    "glm45": ToolStyle(
        GlmParser,
        call_grammars.glm_calls,
        (glm.OPEN, glm.CLOSE, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
        (glm.KEY,),
    ),
    "hermes": ToolStyle(
        HermesParser,
        call_grammars.hermes_calls,
        (hermes.OPEN, hermes.CLOSE),
        ("<tool_call>",),
        # Other forms between the same markers, MiniMax's the third, and Apriel's
        but_not=("<function=", "<arg_key>", "<invoke", "<tool_calls>"),
    ),
}
REASONING_STYLES: Mapping[str, ReasoningStyle] = {
    "openai": ReasoningStyle(("<|channel|>analysis<|message|>", "<|end|>"), ("<|channel|>",)),
    "mistral": ReasoningStyle(("[THINK]", "[/THINK]"), ("[THINK]",)),
    "think": ReasoningStyle(("<think>", "</think>"), ("<think>", "</think>")),
}


@dataclass(frozen=True)
class AnswerStyle:
    """How one engine's model writes its answers.

    Attributes:
        tools, reasoning: names in the registries; None = the model writes none, or nobody can read them.
        template: source of the chat template.
        special: ids of the tokenizer's special tokens by their text.
    """

    tools: str | None
    reasoning: str | None
    template: str
    special: Mapping[str, int]

    @property
    def shown_tokens(self) -> tuple[int, ...]:
        """Special tokens that the parsers must see."""
        markers: list[str] = []
        if self.tools is not None:
            markers += TOOL_STYLES[self.tools].markers
        if self.reasoning == "openai":
            markers += TOOL_STYLES["openai"].markers
        elif self.reasoning is not None:
            markers += REASONING_STYLES[self.reasoning].markers
        return tuple(sorted({self.special[m] for m in markers if m in self.special}))

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of the reasoning."""
        if self.reasoning is None:
            return False
        return prompt.rstrip().endswith(REASONING_STYLES[self.reasoning].markers[0])

    def reasoning_markers(self, opened: bool) -> tuple[str, str] | None:
        """What opens and closes the reasoning of an answer, if there may be any; see ``SamplingParams``."""
        if self.reasoning is None:
            return None
        opening, closing = REASONING_STYLES[self.reasoning].markers
        return ("" if opened else opening), closing

    def parser(
        self, functions: Functions | None, opened: bool, only_known: bool = False
    ) -> AnswerParser | None:
        """A parser for one output; None where its text is all content.

        Args:
            functions: those that may be called; None = no calls.
            opened: the prompt has begun the reasoning.
            only_known: a call of another function is content in every style.
        """
        style = None if functions is None or self.tools is None else TOOL_STYLES[self.tools]
        if self.reasoning == "openai" or (style is not None and style.parser is HarmonyParser):
            return HarmonyParser(functions, only_known)
        calls = None if style is None else style.parser(functions, only_known)
        if self.reasoning is None:
            return calls
        return Reasoned(ThinkParser(REASONING_STYLES[self.reasoning].markers, opened), calls)

    def make_id(self) -> str:
        """An id for a call."""
        return (TOOL_STYLES[self.tools].make_id if self.tools is not None else _openai_id)()

    def calls(self, lark: Lark, functions: Sequence[Function], several: bool) -> str:
        """An expression of calls."""
        assert self.tools is not None
        return TOOL_STYLES[self.tools].grammar(lark, functions, several, self.template)

    def thoughts(self, lark: Lark, opened: bool) -> str:
        """An expression of what may come before the answer itself."""
        if self.reasoning is None:
            return ""
        if self.reasoning == "openai":
            thought = lark.anything_to(harmony.ENDS[0])
            opening = lark.text(harmony.CHANNEL, "analysis", harmony.MESSAGE)
            return f"({opening} {thought} {lark.text(harmony.START, 'assistant')})?"
        opening, closing = REASONING_STYLES[self.reasoning].markers
        rest = f"{lark.anything_to(closing)} {lark.blanks()}"
        return rest if opened else f"({lark.text(opening)} {rest})?"

    def final(self, lark: Lark, answer: str) -> str:
        """An expression of an answer for the user."""
        if self.reasoning != "openai":
            return answer
        return f"{lark.text(harmony.CHANNEL, 'final', harmony.MESSAGE)} {answer}"


def find_style(template: str, special: Mapping[str, int], tools: str, reasoning: str) -> AnswerStyle:
    """The style of an engine.

    Args:
        template: source of its chat template; empty = none.
        tools, reasoning: a name of the registries, ``none``, or ``auto``: what fits the template.

    Raises:
        EngineError: a name that there is not, or two styles that exclude each other.
    """
    if tools == "auto":
        tools = next(
            (
                name
                for name, style in TOOL_STYLES.items()
                if any(s in template for s in style.signs) and not any(s in template for s in style.but_not)
            ),
            "none",
        )
    if reasoning == "auto":
        found = (n for n, style in REASONING_STYLES.items() if any(s in template for s in style.signs))
        reasoning = next(found, "none")
    for option, name, known in (
        ("tool_call_parser", tools, TOOL_STYLES),
        ("reasoning_parser", reasoning, REASONING_STYLES),
    ):
        if name != "none" and name not in known:
            raise EngineError(f"{option} is {name!r}; expected auto, none, {', '.join(known)}")
    if "none" not in (tools, reasoning) and (tools == "openai") != (reasoning == "openai"):
        raise EngineError(
            f"tool_call_parser is {tools} and reasoning_parser {reasoning}; openai is one format for both, "
            "so give it for both, or neither"
        )
    return AnswerStyle(
        None if tools == "none" else tools, None if reasoning == "none" else reasoning, template, special
    )
