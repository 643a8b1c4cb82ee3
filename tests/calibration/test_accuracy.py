"""Perplexity, KL and agreement against torch, on logits of two made-up models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from castiron.engines.accuracy import Comparison
from torch.nn import functional


def test_means_are_over_all_predictions_of_all_windows() -> None:
    rng = np.random.default_rng(11)
    comparison = Comparison()
    found, source, targets = [], [], []
    for length in (9, 33):
        tokens = rng.integers(0, 50, length)
        one = rng.standard_normal((length, 50)).astype(np.float32) * 4
        other = one + rng.standard_normal((length, 50)).astype(np.float32) * 0.3
        comparison.add(tokens, other, one)
        found.append(other[:-1])
        source.append(one[:-1])
        targets.append(tokens[1:])
    p, q = (torch.from_numpy(np.concatenate(rows)).double().log_softmax(-1) for rows in (source, found))
    true = torch.from_numpy(np.concatenate(targets))
    assert comparison.predictions == 8 + 32
    assert comparison.perplexity == pytest.approx(math.exp(functional.nll_loss(q, true)), rel=1e-5)
    assert comparison.source_perplexity == pytest.approx(math.exp(functional.nll_loss(p, true)), rel=1e-5)
    expected = functional.kl_div(q, p, reduction="sum", log_target=True) / 40
    assert comparison.mean_kl == pytest.approx(float(expected), rel=1e-4)
    assert comparison.top1_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert comparison.increase == pytest.approx(comparison.perplexity / comparison.source_perplexity - 1)


def test_a_model_beside_itself_loses_nothing() -> None:
    rng = np.random.default_rng(12)
    logits = rng.standard_normal((20, 30)).astype(np.float32)
    comparison = Comparison()
    for _ in range(3):
        comparison.add(rng.integers(0, 30, 20), logits, logits)
    assert (comparison.mean_kl, comparison.increase, comparison.top1_agreement) == (0.0, 0.0, 1.0)
    assert comparison.increase_error == 0.0


def test_rounding_makes_no_divergence_negative() -> None:
    rng = np.random.default_rng(13)
    logits = rng.standard_normal((64, 300)).astype(np.float32)
    for shift in (1.0, 1e2, 1e3):  # the same model: adding to all logits changes no probability
        comparison = Comparison()
        comparison.add(rng.integers(0, 300, 64), logits + np.float32(shift), logits)
        assert 0.0 <= comparison.mean_kl < 1e-6
        assert f"{comparison.mean_kl:.5f}" == "0.00000"


def test_without_a_source_the_perplexity_alone_is_measured() -> None:
    comparison = Comparison()
    comparison.add(np.zeros(11, np.int64), np.zeros((11, 8), np.float32))
    assert comparison.perplexity == pytest.approx(8)  # all of eight tokens are equally likely
