"""Accuracy of one model beside another, from their logits on windows of a text.

In a window of L tokens a model predicts the last L - 1 from those before them; windows know nothing of each
other. ``perplexity`` is exp of the mean negative log-likelihood of the true token, ``mean_kl`` the mean of
KL(source ‖ model) over the same predictions, in nats, ``top1_agreement`` how often both have the same most
likely token. Means are over predictions, all of which count the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass
class Comparison:
    """Sums over windows; ``add`` one after the other, then read the means."""

    predictions: int = 0
    _nll: float = 0.0
    _source_nll: float = 0.0
    _kl: float = 0.0
    _agreed: int = 0
    #: Log-likelihood ratio of each window, for the standard error.
    _ratios: list[float] = field(default_factory=list)

    def add(self, tokens: Ids, found: Floats, source: Floats | None = None) -> None:
        """``tokens`` [L]; logits [L, V] of the model and, for a comparison, of the source model."""
        targets = tokens[1:]
        rows = np.arange(len(targets))
        log_found = log_softmax(found[:-1])
        nll = -float(log_found[rows, targets].sum(dtype=np.float64))
        self.predictions += len(targets)
        self._nll += nll
        if source is None:
            return
        log_source = log_softmax(source[:-1])
        source_nll = -float(log_source[rows, targets].sum(dtype=np.float64))
        self._source_nll += source_nll
        self._agreed += int((log_found.argmax(-1) == log_source.argmax(-1)).sum())
        self._ratios.append((nll - source_nll) / len(targets))
        log_found -= log_source
        log_found *= np.exp(log_source)
        self._kl -= float(log_found.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """Of the model; infinity where it gives a true token no probability."""
        return _exp(self._nll / self.predictions)

    @property
    def source_perplexity(self) -> float:
        """Of the source model."""
        return _exp(self._source_nll / self.predictions)

    @property
    def mean_kl(self) -> float:
        """KL(source ‖ model), nats. It has no negative values, which rounding makes of a small sum."""
        return 0.0 if self._kl <= 0 else self._kl / self.predictions

    @property
    def top1_agreement(self) -> float:
        """Share of predictions whose most likely token is the same."""
        return self._agreed / self.predictions

    @property
    def increase(self) -> float:
        """Relative increase of the perplexity over the source model's."""
        return self.perplexity / self.source_perplexity - 1

    @property
    def increase_error(self) -> float:
        """Standard error of ``increase``, from the spread over windows; 0 with fewer than two."""
        if len(self._ratios) < 2:
            return 0.0
        return float(np.std(self._ratios, ddof=1) / math.sqrt(len(self._ratios)))


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of each row, a new array."""
    shifted: Floats = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
