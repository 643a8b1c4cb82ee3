"""--log-prompts: what requests ask, in the log. Off unless it is asked for: prompts are private."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sampling_params import SamplingParams
from .request_context import current

if TYPE_CHECKING:
    from .service import Service

_log = logging.getLogger("castiron.prompts")
_MAX_CHARACTERS = 10_000


def log_prompts(service: Service, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Log each prompt as the engine gets it, templates and special tokens included; on a worker thread."""
    context = current.get()
    identity = {} if context is None else {"request_id": context.id}
    session = service.engine.session

    def work() -> None:
        tokenizer = session.tokenizer
        for ids in prompts:
            fields = {
                **identity,
                "prompt": str(ids) if tokenizer is None else tokenizer.decode(ids, False),
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
            }
            fields["prompt"] = str(fields["prompt"])[:_MAX_CHARACTERS]
            _log.info("prompt", extra={"fields": fields})

    service.in_background(work)
