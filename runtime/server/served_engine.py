"""The engine that is served, and its exchange for another one while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from castiron.errors import EngineError, RequestError

from ..async_engine import AsyncEngine
from ..request_errors import ParameterError
from ..sampling_params import SamplingParams
from .parsers import AnswerStyle

_log = logging.getLogger("castiron.server")
#: Sampling fields that a checkpoint's generation_config.json may set, by the same names there and here.
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class ExchangeRunningError(EngineError):
    """Another engine is being loaded already."""


@dataclass(eq=False, slots=True)
class ServedEngine:
    """An engine and the HTTP requests that use it.

    Attributes:
        style: how its model writes calls and reasoning.
        defaults: of sampling: the API's, and over them the checkpoint's.
        users: HTTP requests, and generations that outlive them, that began on it and have not ended.
        retired: another one has taken its place; it is closed when its last user is answered.
    """

    engine: AsyncEngine
    style: AnswerStyle
    defaults: dict[str, Any]
    users: int = 0
    retired: bool = False


def served(
    engine: AsyncEngine, style: AnswerStyle, model_names: tuple[str, ...], use_generation_config: bool = True
) -> ServedEngine:
    """An engine with its defaults; raises EngineError where these are wrong, or a name means two things."""
    adapters = engine.session.adapters
    for name in model_names:
        if adapters is not None and name in adapters.paths:
            raise EngineError(
                f"{name!r} names both the model and a LoRA adapter; give one of them another name by "
                "--served-model-name or --lora-modules"
            )
    source = engine.session.info.generation_config if use_generation_config else {}
    found = {name: source[name] for name in _MODEL_DEFAULTS if source.get(name) is not None}
    defaults: dict[str, Any] = {"temperature": 1.0, **found}
    try:
        SamplingParams(**defaults)
    except ParameterError as e:
        raise EngineError(
            f"the engine's generation_config.json holds a bad default: {e}; serve it with "
            "--generation-config none"
        ) from None
    return ServedEngine(engine, style, defaults)


class EngineSlot:
    """Holds the engine that new requests get; ``loading`` while another is on its way. For the event loop's
    thread alone.
    """

    def __init__(self, first: ServedEngine) -> None:
        self.current = first
        self._older: list[ServedEngine] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.loading = False

    def enter(self) -> ServedEngine:
        """A request begins on the current engine; it stays on it to its end."""
        self.current.users += 1
        return self.current

    def leave(self, used: ServedEngine) -> None:
        """The request is answered."""
        used.users -= 1
        if used.retired and not used.users:
            self._free(used)

    async def exchange(self, load: Callable[[], ServedEngine]) -> ServedEngine:
        """Load another engine, try it, and give it to new requests; the old one finishes its own.

        Raises:
            ExchangeRunningError: one at a time.
            EngineError: the engine cannot be loaded or does not work; the old one stays.
        """
        if self.loading:
            raise ExchangeRunningError("another engine is being loaded; try again when that is done")
        self.loading = True
        try:
            made = await asyncio.to_thread(load)
            try:
                await _try(made.engine)
            except BaseException:
                await made.engine.close()
                raise
        finally:
            self.loading = False
        old, self.current = self.current, made
        old.retired = True
        self._older.append(old)
        if not old.users:
            self._free(old)
        return made

    @property
    def unfinished(self) -> int:
        """Requests that run or wait, in the older engines as well."""
        return sum(each.engine.session.unfinished for each in [self.current, *self._older])

    async def close(self) -> None:
        """Close every engine."""
        for each in [self.current, *self._older]:
            await each.engine.close()

    def close_now(self) -> None:
        """The same outside of the event loop."""
        for each in [self.current, *self._older]:
            each.engine.session.close()

    def _free(self, used: ServedEngine) -> None:
        async def free() -> None:
            await used.engine.close()
            self._older.remove(used)
            _log.info(
                "the engine before is freed", extra={"fields": {"engine": used.engine.session.info.name}}
            )

        task = asyncio.get_running_loop().create_task(free())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _try(engine: AsyncEngine) -> None:
    """One token, so that a device that cannot run the engine is found before requests are."""
    try:
        async for _ in engine.generate([0], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)):
            pass
    except RequestError as e:
        raise EngineError(f"the engine does not work: {e}") from None
