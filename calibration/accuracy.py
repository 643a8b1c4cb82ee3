"""The accuracy report of a quantized model without an engine: its reference beside the source model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from ..engines.accuracy import Comparison
from ..graph.checkpoint import Checkpoint
from .options import EVAL_WINDOW
from .texts import HELD_OUT_TEXT, Windows, default_text, random_windows, read_text, token_windows

Logits = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]


def held_out_windows(checkpoint: Checkpoint, data: Path | None, tokens: int, max_seq_len: int) -> Windows:
    """Windows of about ``tokens`` tokens from the start of a text that calibration did not see."""
    length = min(EVAL_WINDOW, max_seq_len)
    count = max(1, round(tokens / length))
    if not (checkpoint.folder / "tokenizer.json").is_file():
        if data is not None:
            raise BuildError(
                f"{checkpoint.folder} has no tokenizer.json, so {data} cannot become tokens; add the "
                "tokenizer, or leave out --eval-data to compare on random tokens"
            )
        vocabulary = int(checkpoint.hf_config.vocab_size)
        return random_windows(vocabulary, length, count, seed=1)
    text = default_text(HELD_OUT_TEXT) if data is None else read_text(data)
    return token_windows(checkpoint.folder, text, length, count)


def compare(windows: Windows, model: Logits, source: Logits, advance: Callable[[int], None]) -> Comparison:
    """``model`` beside ``source``, window by window; ``advance`` is called with 1 after each."""
    comparison = Comparison()
    for ids in windows.ids:
        comparison.add(ids, model(ids), source(ids))
        advance(1)
    return comparison
