"""Log-probabilities of a prompt's tokens, from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .outputs import TokenLogprob

#: Rows taken at once: a float64 copy of 64 rows of a 150k vocabulary is 77 MB.
_CHUNK_ROWS = 64


def prompt_logprobs(
    token_ids: Sequence[int], logits: npt.NDArray[np.float32], top: int
) -> list[TokenLogprob | None]:
    """Raw log-softmax values of each token given those before it; None for the first, which nothing predicts.

    Args:
        token_ids: n tokens.
        logits: float32 [n, vocab], row i predicts token i + 1.
        top: how many alternatives.
    """
    entries: list[TokenLogprob | None] = [None]
    for begin in range(0, len(token_ids) - 1, _CHUNK_ROWS):
        targets = np.asarray(token_ids[begin + 1 : begin + 1 + _CHUNK_ROWS])
        rows = logits[begin : begin + len(targets)].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        chosen = rows[np.arange(len(targets)), targets]
        best = _largest(rows, top)
        for i, target in enumerate(targets):
            pairs = tuple((int(t), float(rows[i, t])) for t in best[i])
            entries.append(TokenLogprob(int(target), float(chosen[i]), pairs))
    return entries


def _largest(rows: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Columns of the ``count`` largest values of each row, largest first."""
    count = min(count, rows.shape[1])
    if count == 0:
        return np.empty((len(rows), 0), dtype=np.intp)
    found = np.argpartition(-rows, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(rows, found, axis=1), axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)
