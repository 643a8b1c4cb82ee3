"""A benchmark from its options to its result."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from castiron.errors import RequestError

from .client import Client, Target
from .datasets import Conversation, Shape, Turn, make_dataset, read_dataset
from .load import Load, Measured, run, warm_up
from .outcome import Outcome
from .server import first_model, wait_for_answer
from .words import PromptMaker

#: Opens a progress bar of so many requests; what it yields is called with each that has ended.
Progress = Callable[[int], AbstractContextManager[Callable[[Outcome], None]]]


@dataclass(frozen=True)
class Benchmark:
    """What is measured.

    Attributes:
        target: the server; a model named "" is the first that the server lists.
        dataset: the name of a made dataset, or ``custom``.
        dataset_path: custom: a JSONL file.
        tokenizer: a folder with a tokenizer.json, to make prompts of exactly so many tokens.
        num_warmups: requests before the measured ones, and one to see that the server works at all.
        wait_seconds: how long a server that does not listen yet is waited for.
    """

    target: Target
    dataset: str
    shape: Shape
    load: Load = field(default_factory=Load)
    dataset_path: Path | None = None
    tokenizer: Path | None = None
    num_warmups: int = 0
    wait_seconds: float = 0.0
    seed: int = 0

    def conversations(self) -> list[Conversation]:
        """The dataset; the same seed makes the same one."""
        if (self.dataset == "custom") != (self.dataset_path is not None):
            raise RequestError("--dataset-path is the file of --dataset-name custom: give both or neither")
        if self.dataset_path is not None:
            return read_dataset(self.dataset_path, self.shape, chat=self.target.is_chat)
        return self._made(self.dataset, self.shape, self.seed)

    def warm_ups(self) -> list[Turn]:
        """One request to see that the server works, and ``num_warmups`` more: prompts of their own, so that
        the server's prefix cache knows none of those that are measured.
        """
        shape = replace(self.shape, num_prompts=1 + self.num_warmups)
        return [turns[0] for turns in self._made("random", shape, self.seed + 1)]

    def _made(self, name: str, shape: Shape, seed: int) -> list[Conversation]:
        rng = random.Random(seed)
        return make_dataset(name, shape, PromptMaker(rng, self._count), rng)

    @cached_property
    def _count(self) -> Callable[[str], int] | None:
        if self.tokenizer is None:
            return None
        from ..tokenizer import Tokenizer

        tokenizer = Tokenizer(self.tokenizer)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False))

    async def measure(
        self, conversations: Sequence[Conversation], progress: Progress
    ) -> tuple[str, Measured]:
        """Run it; returns the model's name and what was measured.

        Raises:
            RequestError: the server cannot be reached, or does not even answer the first request.
        """
        target, headers = self.target, self.target.headers
        if target.model:
            await wait_for_answer(target.base_url, headers, self.wait_seconds)
        else:
            found = await first_model(target.base_url, headers, self.wait_seconds)
            target = replace(target, model=found)
        first, *more = self.warm_ups()
        async with Client(target) as client:
            failure = await warm_up(client, [first]) or await warm_up(client, more)
            if failure is not None:
                raise RequestError(f"the test request to {target.url} failed: {failure}")
            rng = random.Random(self.seed + 2)
            with progress(sum(map(len, conversations))) as advance:
                return target.model, await run(client, conversations, self.load, rng, advance)

    def description(self, model: str) -> dict[str, Any]:
        """What was measured, for the result."""
        rate = self.load.request_rate
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": "openai-chat" if self.target.is_chat else "openai",
            "base_url": self.target.base_url,
            "endpoint": self.target.endpoint,
            "model_id": model,
            "tokenizer_id": None if self.tokenizer is None else str(self.tokenizer),
            "dataset_name": self.dataset,
            "num_prompts": self.shape.num_prompts,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": self.load.burstiness,
            "max_concurrency": self.load.max_concurrency,
            "seed": self.seed,
        }
