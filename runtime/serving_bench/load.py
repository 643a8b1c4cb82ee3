"""Sending a dataset at a rate, or as fast as a number of users take it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from .client import Client
from .datasets import Conversation, Turn
from .outcome import Outcome


@dataclass(frozen=True)
class Load:
    """When requests are sent.

    Attributes:
        request_rate: conversations that begin in a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the time between them: 1 is a Poisson process, less has
            bursts, more is more even.
        max_concurrency: requests under way at once; the others wait in the client. None: no limit.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def arrivals(self, count: int, rng: random.Random) -> list[float]:
        """Seconds from the start at which each conversation begins; the first at 0."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        times, now = [], 0.0
        for _ in range(count):
            times.append(now)
            now += rng.gammavariate(self.burstiness, 1 / (self.request_rate * self.burstiness))
        return times


@dataclass(frozen=True)
class Measured:
    """All requests of a run.

    Attributes:
        outcomes: in the order of the dataset, the turns of a conversation one after the other.
        started: ``time.perf_counter`` at the start.
        duration: seconds from then to the end of the last request.
    """

    outcomes: Sequence[Outcome]
    started: float
    duration: float


async def run(
    client: Client,
    conversations: Sequence[Conversation],
    load: Load,
    rng: random.Random,
    progress: Callable[[Outcome], None],
) -> Measured:
    """Send all conversations and wait for their ends; a failed request ends its conversation."""
    slots = nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    arrivals = load.arrivals(len(conversations), rng)
    began = time.perf_counter()

    async def hold(conversation: Conversation, arrival: float) -> list[Outcome]:
        await asyncio.sleep(began + arrival - time.perf_counter())
        history: list[Any] = []
        outcomes: list[Outcome] = []
        for turn in conversation:
            history += turn.messages
            async with slots:
                outcome = await client.send(history, turn.output_len)
            outcomes.append(outcome)
            progress(outcome)
            if outcome.error is not None:
                break
            history.append({"role": "assistant", "content": outcome.text})
        return outcomes + [_unsent(outcomes[-1], progress) for _ in range(len(conversation) - len(outcomes))]

    found = await asyncio.gather(*map(hold, conversations, arrivals))
    outcomes = [outcome for each in found for outcome in each]
    return Measured(outcomes, began, max(o.ended for o in outcomes) - began)


def _unsent(last: Outcome, progress: Callable[[Outcome], None]) -> Outcome:
    """A turn that was not sent, because the one before it failed."""
    error = "not sent: the turn before it failed"
    outcome = replace(last, started=last.ended, token_times=[], output_tokens=0, text="", error=error)
    progress(outcome)
    return outcome


async def warm_up(client: Client, turns: Sequence[Turn]) -> str | None:
    """Send requests all at once; the error of the first that failed, if any."""
    outcomes = await asyncio.gather(*(client.send(turn.messages, turn.output_len) for turn in turns))
    return next((o.error for o in outcomes if o.error is not None), None)
