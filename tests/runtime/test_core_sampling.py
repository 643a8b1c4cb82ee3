"""The core's filters and penalties against the logits processors of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.runtime import _core
from core_engine import arguments, finish, generate, params, prompt, tiny

torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers.generation.logits_process")

PROMPT = [3, 17, 17, 40, 8, 21]
DRAWS = 1500


@pytest.fixture(scope="module")
def core(engine_folder: Path) -> Iterator[Any]:
    engine = _core.Engine(**arguments(engine_folder))
    yield engine
    engine.shutdown()


def expected_distribution(logits: np.ndarray[Any, Any], fields: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The distribution of the first token, as transformers' ``generate`` would make it."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    ids = torch.tensor([PROMPT])
    chain: list[Any] = []
    if "allowed_token_ids" in fields:
        others = sorted(set(range(scores.shape[-1])) - set(fields["allowed_token_ids"]))
        chain.append(processors.SuppressTokensLogitsProcessor(others))
    if "bad_words" in fields:
        chain.append(processors.NoBadWordsLogitsProcessor(fields["bad_words"]))
    if "no_repeat_ngram_size" in fields:
        chain.append(processors.NoRepeatNGramLogitsProcessor(fields["no_repeat_ngram_size"]))
    if "logit_bias" in fields:
        bias = {(token,): value for token, value in fields["logit_bias"].items()}
        chain.append(processors.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in fields:
        chain.append(processors.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    chain.append(processors.TemperatureLogitsWarper(fields.get("temperature", 1.0)))
    if "top_k" in fields:
        chain.append(processors.TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        chain.append(processors.TopPLogitsWarper(fields["top_p"]))
    if "min_p" in fields:
        chain.append(processors.MinPLogitsWarper(fields["min_p"]))
    if "typical_p" in fields:
        chain.append(processors.TypicalLogitsWarper(fields["typical_p"]))
    for processor in chain:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5, "top_k": 5},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 3.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 2.0, "typical_p": 0.6},
        {"temperature": 2.0, "typical_p": 0.3, "top_p": 0.95},
        {"temperature": 3.0, "typical_p": 0.7, "top_k": 15, "min_p": 0.02},
        {"temperature": 2.0, "repetition_penalty": 1.6},
        {"temperature": 2.0, "repetition_penalty": 0.6, "top_p": 0.7},
        {"allowed_token_ids": [2, 9, 30, 52]},
        {"bad_words": [[4], [5], [11, 12]], "temperature": 2.0},
        {"no_repeat_ngram_size": 1, "temperature": 2.0},
        {"logit_bias": {7: 3.0, 8: -100.0, 40: 1.5}, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_first_tokens_are_distributed_as_transformers_says(core: Any, fields: dict[str, Any]) -> None:
    context = generate(core, PROMPT, max_tokens=1, context_logits=True).context_logits
    assert context is not None
    expected = expected_distribution(context[-1], fields)
    ids = [
        core.submit(prompt(PROMPT), params(**{"temperature": 1.0, **fields}, max_tokens=1, seed=seed))
        for seed in range(DRAWS)
    ]
    drawn = [outcome.token_ids[0] for outcome in finish(core, ids).values()]
    counts = np.bincount(drawn, minlength=tiny.VOCAB)
    assert not counts[expected == 0].any()
    # Binomial: 5 standard deviations in any of 53 cells and 8 cases have a chance of 2e-4; seeds are fixed.
    deviation = np.abs(counts - DRAWS * expected)
    assert (deviation <= 5 * np.sqrt(DRAWS * expected * (1 - expected)) + 1).all()


def test_a_top_p_that_decays_ends_as_greedy_decoding_and_begins_again_at_its_tokens(core: Any) -> None:
    # After one token top_p is 1e-5: the likeliest token alone.
    fields = {"temperature": 3.0, "top_p": 1.0, "top_p_decay": 1e-5, "top_p_min": 1e-5, "max_tokens": 6}
    firsts, seconds = set(), set()
    for seed in range(12):
        tokens = generate(core, PROMPT, seed=seed, **fields).token_ids
        assert tokens[1:] == generate(core, [*PROMPT, tokens[0]], max_tokens=5).token_ids
        again = generate(core, PROMPT, seed=seed, top_p_reset_ids=[tokens[0]], **fields).token_ids
        assert again[0] == tokens[0]
        firsts.add(tokens[0])
        seconds.add(again[1] == tokens[1])
    assert len(firsts) > 3
    assert False in seconds
