"""cpp/sampling/sampler.h in numpy and float64: what the sampling kernels are tested against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _edited(row: Array, edits: list[tuple[int, int]], rows: Mapping[str, Array], index: int) -> Array:
    row = row.copy()
    for token, count in edits:
        if count < 0:
            row[token] = -np.inf
            continue
        penalty = float(rows["repetition"][index])
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if count > 0:
            row[token] -= float(rows["frequency"][index]) * count + float(rows["presence"][index])
    return row


def kept_tokens(row: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """Ids that may be drawn, likeliest first, after temperature, top-k, top-p and min-p."""
    order = np.lexsort((np.arange(len(row)), -row))
    if 0 < top_k < len(row):
        order = order[:top_k]
    weights = np.exp((row[order] - row.max()) / temperature)
    if top_p < 1:
        passed = np.cumsum(weights)
        order = order[: int(np.searchsorted(passed, top_p * passed[-1])) + 1]
    weights = weights[: len(order)]
    kept: Array = order[(weights >= min_p) & (weights > np.exp(-87.0))]
    return kept


def _drawn(row: Array, rows: Mapping[str, Array], index: int) -> int:
    temperature = float(rows["temperature"][index])
    top_k = int(rows["top_k"][index])
    kept = kept_tokens(row, temperature, top_k, float(rows["top_p"][index]), float(rows["min_p"][index]))
    if not 0 < top_k < len(row):
        kept = np.sort(kept)
    passed = np.cumsum(np.exp((row[kept] - row.max()) / temperature))
    at = np.searchsorted(passed, float(rows["uniform"][index]) * passed[-1], side="right")
    return int(kept[min(int(at), len(kept) - 1)])


def sample(
    logits: Array, *, rows: Mapping[str, Array], vocab_limit: int, most: int = 20
) -> tuple[Array, Array, Array]:
    """[N, 2] token and status, [N, most] likeliest ids, [N, 1 + most] log-probabilities.

    ``rows`` holds the step inputs of sampling by name.
    """
    count, vocab = logits.shape
    sampled = np.full((count, 2), -1, np.int32)
    top = np.full((count, most), -1, np.int32)
    logprobs = np.zeros((count, 1 + most))
    for index in range(count):
        raw = np.asarray(logits[index], np.float64)
        row = raw[:vocab_limit]
        if np.isnan(row).any() or row.max() == np.inf:
            sampled[index, 1] = 1
            continue
        edits = [
            (int(token), int(seen))
            for at, token, seen in zip(*(rows[f"edit_{n}"] for n in ("row", "token", "count")), strict=True)
            if at == index
        ]
        row = _edited(row, edits, rows, index)
        if row.max() == -np.inf:
            sampled[index, 1] = 2
            continue
        greedy = rows["temperature"][index] < 1e-5
        token = int(row.argmax()) if greedy else _drawn(row, rows, index)
        sampled[index] = token, 0
        wanted = int(rows["num_logprobs"][index])
        if wanted >= 0:
            log_sum = raw.max() + np.log(np.exp(raw[:vocab] - raw.max()).sum())
            logprobs[index, 0] = raw[token] - log_sum
            listed = np.lexsort((np.arange(vocab_limit), -raw[:vocab_limit]))[:wanted]
            listed = listed[raw[listed] > -np.inf]
            top[index, : len(listed)] = listed
            logprobs[index, 1 : 1 + len(listed)] = raw[listed] - log_sum
    return sampled, top, logprobs


def feed_sampled(token_ids: Array, token_source: Array, sampled: Array) -> tuple[Array, ...]:
    """Token ids [T] with those of rows of ``sampled`` [N, 2] where ``token_source`` [T] names one."""
    taken = np.maximum(sampled[np.maximum(token_source, 0), 0], 0)
    return (np.where(token_source >= 0, taken, token_ids),)
