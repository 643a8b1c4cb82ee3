"""What a benchmark sends: conversations of one or more turns."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castiron.errors import RequestError

from .words import PromptMaker

NAMES = ("random", "shared-prefix", "multi-turn", "custom")


@dataclass(frozen=True)
class Turn:
    """What a user says next, and how long the answer may be.

    Attributes:
        messages: OpenAI's; they follow what was said before.
        output_len: tokens of the answer at most.
    """

    messages: Sequence[Mapping[str, Any]]
    output_len: int


#: Its turns follow one another: each is sent with all turns and answers before it.
Conversation = Sequence[Turn]


@dataclass(frozen=True)
class Shape:
    """How large a made dataset is.

    Attributes:
        num_prompts: requests in all.
        input_len: tokens that are new in each request.
        output_len: tokens of each answer.
        range_ratio: lengths are drawn from (1 - ratio) to (1 + ratio) times these.
        prefix_len: shared-prefix: tokens that requests have in common.
        num_prefixes: shared-prefix: how many such beginnings there are.
        num_turns: multi-turn: requests of a conversation.
    """

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 256
    num_prefixes: int = 4
    num_turns: int = 4


def make_dataset(name: str, shape: Shape, maker: PromptMaker, rng: random.Random) -> list[Conversation]:
    """Conversations of a made dataset: ``random``, ``shared-prefix`` or ``multi-turn``."""

    def drawn(length: int) -> int:
        low, high = (round(length * (1 + sign * shape.range_ratio)) for sign in (-1, 1))
        return rng.randint(max(1, low), max(1, high))

    def turn(prefix: str = "") -> Turn:
        text = " ".join(filter(None, (prefix, maker.text(drawn(shape.input_len)))))
        return Turn([{"role": "user", "content": text}], drawn(shape.output_len))

    if name == "random":
        return [[turn()] for _ in range(shape.num_prompts)]
    if name == "shared-prefix":
        prefixes = [maker.text(shape.prefix_len) for _ in range(shape.num_prefixes)]
        return [[turn(prefixes[i % shape.num_prefixes])] for i in range(shape.num_prompts)]
    whole, rest = divmod(shape.num_prompts, shape.num_turns)
    return [[turn() for _ in range(count)] for count in [shape.num_turns] * whole + [rest] * (rest > 0)]


def read_dataset(path: Path, shape: Shape, *, chat: bool) -> list[Conversation]:
    """The first ``num_prompts`` lines of a JSONL file: ``{"prompt": text}`` or ``{"messages": [...]}``, with
    ``output_len`` where it is not the option's.

    Raises:
        RequestError: a line that is neither, or messages for a completions endpoint.
    """
    found: list[Conversation] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--dataset-path {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and len(found) < shape.num_prompts:
            found.append([_turn(line, f"{path}, line {number}", shape, chat)])
    if not found:
        raise RequestError(f"--dataset-path {path} holds no request")
    return found


def _turn(line: str, where: str, shape: Shape, chat: bool) -> Turn:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}") from None
    prompt = given.get("prompt") if isinstance(given, dict) else None
    messages = given.get("messages") if isinstance(given, dict) else None
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise RequestError(
            f'{where} has neither a text as "prompt" nor a list of messages as "messages"; expected '
            '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
        )
    elif not chat:
        raise RequestError(f"{where} has messages; send them to --endpoint /v1/chat/completions")
    length = given.get("output_len", shape.output_len)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise RequestError(f"{where}: output_len is {length!r}; expected a number of tokens from 1 on")
    return Turn(messages, length)
