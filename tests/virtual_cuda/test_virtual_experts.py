"""Mixtures of experts on the virtual device: prefill in tiles of one expert's rows, then decode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
import quantizers
from quantized_formats import FORMATS, MXFP4_EXPERTS
from zoo import make_checkpoint, source_model

LIMITS: dict[str, Any] = {"max_batch_size": 2, "max_num_tokens": 24, "max_seq_len": 64, "max_logit_rows": 24}
PROMPT_TOKENS, NEW_TOKENS = 21, 3
#: Weights and activations rounded to bfloat16 (2⁻⁹ relative, each) through two layers; relative to the
#: largest logit.
TOLERANCE = 0.03
#: Rows of a prompt that are forgiven, and one of the answer: a token whose router decides otherwise for that
#: rounding goes to another expert.
FLIPPED = 2
CASES = [("mixtral", 90, 2), ("qwen3_moe", 80, 1), ("gpt_oss", 100, 1)]
SWEEP = [
    ("qwen2_moe", 89, 2),
    ("olmoe", 90, 1),
    ("granitemoe", 120, 1),
    ("ernie4_5_moe", 90, 1),
    ("hunyuan_v1_moe", 86, 1),
    ("flex_olmo", 80, 1),
]


def generate(engine: Path, cc: int, tokens: list[int]) -> dict[str, Any]:
    gpu = VirtualGpu(engine, cc)
    with ModelRunner.from_dir(engine, device="cuda", kv_cache_blocks=8) as runner:
        logits = runner.context_logits(tokens)
        result = runner.generate(input_ids=[tokens], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    found = result[0].outputs[0].token_ids
    kernels = {name.split(".")[0] for name in gpu.interpreter.launches}
    return {"logits": logits, "tokens": found, "kernels": kernels, "faults": gpu.driver.faults()}


@pytest.mark.parametrize(
    ("family", "cc", "seed"), [*CASES, *(pytest.param(*case, marks=pytest.mark.sweep) for case in SWEEP)]
)
def test_a_mixture_answers_as_in_transformers(family: str, cc: int, seed: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / "model")
    kernels = check(tmp_path, source_model(tmp_path / "model"), cc, seed)
    assert {"top_k", "expert_order", "expert_tile", "expert_stream", "combine_experts"} <= kernels


@pytest.mark.parametrize(
    ("family", "form", "cc", "seed"),
    [("gpt_oss", MXFP4_EXPERTS, 90, 1), ("qwen3_moe", FORMATS["awq"], 80, 1)],
)
def test_quantized_experts_are_multiplied_from_their_codes(
    family: str, form: quantizers.Format, cc: int, seed: int, tmp_path: Path
) -> None:
    model = quantizers.write(tmp_path / "model", form, family)
    kernels = check(tmp_path, model, cc, seed)
    assert {"expert_order", "quantized_expert_tile", "quantized_expert_stream"} <= kernels
    assert not {"expert_tile", "expert_stream"} & kernels


def check(folder: Path, source: Any, cc: int, seed: int) -> set[str]:
    """Compare an engine of folder/model with its source in float32; gives the kernels that ran."""
    with without_compiler():
        options = BuildOptions(targets=(f"sm_{cc}",), ptx=False, verify="never", **LIMITS)
        build(folder / "model", folder / "engine", options)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 200, (PROMPT_TOKENS,), generator=generator).tolist()
    found = in_process(generate, folder / "engine", cc, tokens, timeout=300)
    assert found["faults"] == []
    with torch.no_grad():
        whole = source(torch.tensor([tokens + found["tokens"]]), use_cache=False).logits[0].numpy()
    tolerance = TOLERANCE * np.abs(whole).max()
    errors = np.sort(np.abs(found["logits"] - whole[:PROMPT_TOKENS]).max(axis=1))
    assert errors[-1 - FLIPPED] <= tolerance, errors
    # Greedy: each token is the source's best, or a tie of rounding with it.
    answers = whole[PROMPT_TOKENS - 1 : -1]
    short = answers.max(axis=1) - answers[np.arange(NEW_TOKENS), found["tokens"]]
    assert np.sort(short)[-2] <= 2 * tolerance
    return found["kernels"]  # type: ignore[no-any-return]
