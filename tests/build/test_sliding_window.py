"""Blocks behind the window of a model whose every layer slides: given back, and nothing changes by it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

LENGTH = 400


def test_a_long_mistral_output_holds_a_few_blocks_and_has_the_bits_of_one_that_holds_all(
    tmp_path: Path,
) -> None:
    make_checkpoint("mistral", tmp_path / "model")  # a window of 8 tokens
    options = BuildOptions(
        dtype="float32",
        max_batch_size=2,
        max_num_tokens=512,
        max_logit_rows=512,
        max_seq_len=512,
        verify="never",
    )
    build(tmp_path / "model", tmp_path / "engine", options)
    prompt = [(7 * i + 3) % 50 for i in range(20)]
    wanted = SamplingParams(
        temperature=0.0, max_tokens=LENGTH, ignore_eos=True, return_generation_logits=True
    )
    with ModelRunner.from_dir(tmp_path / "engine", max_num_tokens=32, enable_prefix_caching=False) as runner:
        assert runner.stats()["kv_window"] == 8
        (output,) = runner.generate(input_ids=prompt, sampling_params=wanted)[0].outputs
        records = runner._session.core.stats(1024)["recent_steps"]
    # The block of the last token, the one before it and one more at most; 420 tokens fill 14.
    assert max(record["kv_blocks_used"] for record in records) <= 3
    assert len(output.token_ids) == LENGTH
    # The same text as one prompt in one step: its blocks are all there, and none is given back.
    with ModelRunner.from_dir(tmp_path / "engine") as runner:
        logits = runner.context_logits([*prompt, *output.token_ids])
        assert runner.stats()["last_step"]["prefill_tokens"] == len(prompt) + LENGTH
    assert output.generation_logits is not None
    np.testing.assert_array_equal(logits[len(prompt) - 1 : -1], output.generation_logits)
