"""Every supported family from its Hugging Face folder to tokens of the C++ runtime, against transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import CONFIGS, make_checkpoint, source_model

#: Chunks of 16 tokens and KV blocks of 32: prompts of 1 to 45 tokens lie on both sides of either border,
#: and of the zoo's sliding windows of 8.
OPTIONS = BuildOptions(
    dtype="float32", max_batch_size=4, max_num_tokens=16, max_seq_len=96, max_logit_rows=16, verify="never"
)
LENGTHS = (1, 9, 33, 45)
NEW_TOKENS = 12
#: float32 against float32 in another order of summation, logits of size one to three.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_engine_has_the_logits_and_the_greedy_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "model")
    build(tmp_path / "model", tmp_path / "engine", OPTIONS)
    source = source_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 200, (1, length), generator=generator) for length in LENGTHS]
    with ModelRunner.from_dir(tmp_path / "engine") as runner:
        results = runner.generate(
            input_ids=[prompt[0].tolist() for prompt in prompts], max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        for prompt, result in zip(prompts, results, strict=True):
            tokens = result.outputs[0].token_ids
            # The source's logits over prompt and answer: prefill rows, and a row for each decoded token.
            whole = torch.cat([prompt, torch.tensor([tokens])], dim=1)
            with torch.no_grad():
                wanted = source(whole, use_cache=False).logits[0].numpy()
            found = runner.context_logits(whole[0].tolist())
            assert np.abs(found - wanted).max() <= TOLERANCE
            # Greedy: each token is the source's best, or a tie of rounding with it.
            answer = wanted[prompt.shape[1] - 1 : -1]
            assert len(answer) == len(tokens) == NEW_TOKENS
            short = answer.max(axis=1) - answer[np.arange(NEW_TOKENS), tokens]
            assert short.max() <= 2 * TOLERANCE
