"""Loading the tokenizer beside the weights: both take about as long, and the core leaves the GIL free."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class TokenizerPreload:
    """Starts to load a tokenizer on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcome: Tokenizer | Exception | None = None
        self._thread = threading.Thread(target=self._load, name="castiron-tokenizer", daemon=True)
        self._thread.start()

    def result(self) -> Tokenizer:
        """Wait for the tokenizer; raises EngineError when it cannot be read."""
        self._thread.join()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _load(self) -> None:
        try:
            from .tokenizer import Tokenizer

            self._outcome = Tokenizer(self._folder)
        except Exception as e:  # handed to whoever asks for the tokenizer
            self._outcome = e
