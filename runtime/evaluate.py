"""Accuracy of an engine on token windows, on this machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from castiron.errors import EngineError

from ..engines import Engine
from ..engines.accuracy import Comparison
from .options import RuntimeOptions
from .probe import Probe
from .verify import CoreRunner

Floats = npt.NDArray[np.float32]


def evaluate(
    engine: Engine,
    windows: npt.NDArray[np.int64],
    source: Callable[[npt.NDArray[np.int64]], Floats] | None = None,
    *,
    options: RuntimeOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Comparison, str]:
    """Compare ``engine`` with its source on ``windows`` of token ids [count, length].

    ``source``: logits [length, vocab] of the source model for one window; without it the perplexity alone is
    measured. ``progress``: called with (windows done, windows in all). Returns the sums, and the device.

    Raises EngineError where a window is longer than the engine's sequences or a request fails.
    """
    count, length = windows.shape
    longest = engine.manifest.limits.max_seq_len
    if length > longest:
        raise EngineError(
            f"a window is {length} tokens, and {engine.path} was built for sequences of {longest}; give "
            f"windows of {longest} tokens or less"
        )
    comparison = Comparison()
    with CoreRunner(engine, length, options) as runner:
        probe = Probe(runner.core, runner.make_params)
        for index, ids in enumerate(windows):
            found = probe.context_logits(ids.astype(np.int32))
            comparison.add(ids, found, None if source is None else source(ids))
            if progress is not None:
                progress(index + 1, count)
        return comparison, str(runner.choice)
