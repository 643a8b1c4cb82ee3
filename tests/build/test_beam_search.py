"""Beam searches of the C++ runtime against transformers' generate(num_beams=k) on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

#: Prompts of one token, across a border of KV blocks (32 tokens) and of several chunks (16 tokens).
LENGTHS = (1, 7, 31, 32, 45)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ModelRunner]]:
    folder = tmp_path_factory.mktemp("beams")
    make_checkpoint("llama", folder / "model")
    options = BuildOptions(
        dtype="float32", max_batch_size=8, max_num_tokens=16, max_seq_len=96, verify="never"
    )
    build(folder / "model", folder / "engine", options)
    source = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    with ModelRunner.from_dir(folder / "engine") as runner:
        yield source, runner


def expected(source: Any, prompt: list[int], **options: Any) -> tuple[list[list[int]], np.ndarray]:
    """New tokens of each text, best first, and their scores."""
    found = source.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **options,
    )
    ends = options["eos_token_id"]
    texts = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:end])
    return texts, found.sequences_scores.numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "length_penalty": 0.0},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
        {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
        {"num_beams": 5, "early_stopping": True, "repetition_penalty": 1.4},
        {"num_beams": 4, "no_repeat_ngram_size": 1, "length_penalty": 0.5},
    ],
    ids=str,
)
def test_texts_and_scores_are_those_of_transformers(
    models: tuple[Any, ModelRunner], options: dict[str, Any]
) -> None:
    source, runner = models
    generator = torch.Generator().manual_seed(11)
    # Enough end tokens that some texts end early and some at 14 tokens.
    ends = torch.randperm(200, generator=generator)[:12].tolist()
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]
    beams = options["num_beams"]
    common = {**options, "max_new_tokens": 14, "num_return_sequences": beams}
    results = runner.generate(input_ids=prompts, ignore_eos=True, stop_token_ids=ends, **common)
    lengths = set()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        texts, scores = expected(source, prompt, eos_token_id=ends, **common)
        assert [out.token_ids for out in result.outputs] == texts
        # Sums of 14 log-probabilities in float32, each a few units in the last place off.
        np.testing.assert_allclose([out.score for out in result.outputs], scores, rtol=1e-4)
        for out in result.outputs:
            ended = out.finish_reason == "stop"
            assert (out.stop_reason in ends) == ended
            length = len(out.token_ids) + ended
            lengths.add(length)
            penalty = length ** options.get("length_penalty", 1.0)
            assert out.cumulative_logprob == pytest.approx(out.score * penalty)
    assert len(lengths) > 1 or options.get("length_penalty", 1.0) > 1.0
